"""The roles vllm, nixl and model on real hosts, through the product's own adapter.

Environments are built by the hosts' own pip from wheels that are served to them; models come from
S3 (moto), a hub and a shared folder. Hosts have faults of their own in one run: that the others
are done is the proof that a host which fails stops alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import boto3
import pytest
from moto.server import ThreadedMotoServer

from kvdeploy.adapters.ansible.client import Ansible, Play
from kvdeploy.adapters.tinymodel import ensure_tiny_model
from kvdeploy.errors import PlaybookError, UnreachableError
from kvdeploy.model import catalog, layout
from kvdeploy.model.inventory import Host as Node
from kvdeploy.model.inventory import Inventory
from kvdeploy.model.listing import entries
from kvdeploy.polling import wait_for
from tests.e2e.hub import run_hub
from tests.hostlab.efa import OLDER
from tests.playbooks import installed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tests.hostlab.guest import Host
    from tests.playbooks.conftest import Labs, Served

ROOT: Final = Path(__file__).parents[2]
LOCKS: Final = ROOT / "kvdeploy/locks"
RUNTIMES: Final = f"{layout.ROOT}/runtimes"
WEIGHTS: Final = "model.safetensors"
TOKEN: Final = "hf_never-to-be-seen"
P, D = "prefill-0", "decode-0"
X, Y = "decode-1", "decode-2"
"""Without drivers and environments: for what is refused before anything is built."""
SHARED: Final = "/mnt/shared"
HUB_LIBRARY: Final = "/mnt/hub-library"
HUB_NEEDS: Final = (
    "anyio certifi click filelock fsspec h11 httpcore2 httpx2 huggingface_hub idna packaging "
    "pyyaml sniffio tqdm truststore typing_extensions"
)
TOLD_S: Final = 60
"""How soon a host that lost its power is told."""
AGAIN: Final = "Run this again when the cause is gone: it goes on from here."
VARIABLES: Final[dict[str, Any]] = {
    "base_user": layout.USER,
    "base_root": layout.ROOT,
    "vllm_device": "cuda",
    "vllm_probe": str(ROOT / "kvdeploy/probes/runtime.py"),
    "vllm_min_version": ".".join(map(str, catalog.VLLM_MIN)),
    "vllm_nixl_min_version": ".".join(map(str, catalog.NIXL_MIN)),
    "vllm_compiler": False,
    "nixl_backend": "LIBFABRIC",
    "nixl_libfabric": layout.LIBFABRIC,
    "nixl_python": layout.RUNTIME_PYTHON,
    "efa_version": catalog.EFA_INSTALLER,
    "model_source": "copy",
    "model_path": f"{layout.MODELS}/tiny",
    "model_python": layout.RUNTIME_PYTHON,
}


@dataclass(kw_only=True)
class Outcome:
    """How a run ended, host by host."""

    failed: dict[str, str] = field(default_factory=dict)
    """Host -> what its last task said."""
    changed: dict[str, list[str]] = field(default_factory=dict)
    """Host -> tasks that changed something."""
    log: str = ""
    gone: str = ""
    """What was said of hosts that did not answer any more."""


class Bench:
    """A lab, and the three roles on any of its hosts."""

    def __init__(self, served: Served, model: Path, folder: Path) -> None:
        self.served, self._folder, self._runs = served, folder, 0
        self._variables = VARIABLES | served.variables | {"model_id": str(model)}
        for name in ("ansible.cfg", "roles"):
            (folder / name).symlink_to(ROOT / "playbooks" / name)
        (folder / "runtime.yml").write_text(
            "- {name: Runtime, hosts: gpu, become: true, gather_facts: false, "
            "roles: [vllm, nixl, model]}\n"
        )

    def __getitem__(self, name: str) -> Host:
        return self.served[name]

    def run(
        self,
        hosts: Mapping[str, Mapping[str, Any]],
        *tags: str,
        secrets: Mapping[str, Any] | None = None,
        **variables: Any,
    ) -> Outcome:
        """`hosts`: name -> variables of its own."""
        self._runs += 1
        log = self._folder / f"{self._runs}.jsonl"
        nodes = tuple(
            Node(
                name=name,
                role="prefill" if name == P else "decode",
                address=self[name].address,
                vars=dict(own),
            )
            for name, own in hosts.items()
        )
        inventory = Inventory(
            hosts=nodes,
            connection=self.served.lab.connection(),
            group_vars={"all": self._variables | variables},
        )
        play = Play(
            playbook="runtime.yml",
            inventory=inventory,
            secrets=secrets or {},
            tags=tags,
            timeout_s=300,
        )
        outcome = Outcome(changed={name: [] for name in hosts})
        try:
            Ansible(log, self._folder).run(play)
        except PlaybookError:
            assert log.exists()
        except UnreachableError as e:
            outcome.gone = e.message
        outcome.log = log.read_text()
        for entry in map(json.loads, outcome.log.splitlines()):
            match entry["event"]:
                case "runner_on_failed":
                    outcome.failed[entry["host"]] = entry["message"]
                case "runner_on_ok" if entry["changed"]:
                    outcome.changed[entry["host"]].append(entry["task"])
        return outcome

    def manifest(self, host: str, path: str = VARIABLES["model_path"]) -> dict[str, Any]:
        text = self[host].must("cat", f"{path}/.kvdeploy-manifest.json")
        return dict(json.loads(text))

    def runtime(self, host: str) -> str:
        return self[host].must("readlink", layout.RUNTIME).strip()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = ensure_tiny_model(tmp_path_factory.mktemp("models"), seed=1)
    for parent in (folder.parent, folder.parent.parent):
        parent.chmod(0o755)  # hosts see it as another user
    return folder


@pytest.fixture(scope="module")
def bench(labs: Labs, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    library = tmp_path_factory.mktemp("hub-library")
    pins = {pin.partition("==")[0].lower(): pin for pin in entries((LOCKS / "cpu.txt").read_text())}
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    needs = (pins[name] for name in HUB_NEEDS.split())
    subprocess.run([*argv, "--target", str(library), *needs], check=True)
    library.chmod(0o755)
    binds = {model: Path(SHARED), library: Path(HUB_LIBRARY)}
    served = labs(P, D, X, Y, hardware={P: "p5en", D: "p5en", X: "none", Y: "none"}, binds=binds)
    made = Bench(served, model, tmp_path_factory.mktemp("playbooks"))
    for host in (P, D, X, Y):
        made[host].must("sh", "-c", installed.A_NODE)
    for host in (P, D):
        made[host].must("sh", "-c", installed.DRIVER)
    made[P].must("sh", "-c", installed.EFA.format(catalog.EFA_INSTALLER))
    made[D].must("sh", "-c", installed.EFA.format(OLDER))
    return made


@pytest.fixture(scope="module")
def first(bench: Bench, model: Path) -> Outcome:
    """Both hosts made from nothing; decode-0 has the libfabric of an older EFA installer."""
    return bench.run({P: {}, D: {}})


@pytest.fixture(scope="module")
def second(bench: Bench, first: Outcome, model: Path) -> Outcome:
    bench[D].must("sh", "-c", installed.EFA.format(catalog.EFA_INSTALLER))
    return bench.run({P: {}, D: {}})


# --- environment and plugin --------------------------------------------------------------------


def test_an_old_libfabric_stops_that_host_alone(first: Outcome) -> None:
    assert first.failed == {
        D: "decode-0 cannot push over LIBFABRIC: libplugin_LIBFABRIC.so needs FABRIC_1.10, and the "
        "node's libfabric 2.6.0 (/opt/amazon/efa/lib/libfabric.so.1, EFA 1.50.0) has up to "
        "FABRIC_1.9. Install EFA 1.51.0 (role efa): its libfabric is the one that this NIXL was "
        "built for."
    }


def test_what_is_done_is_not_done_again(second: Outcome) -> None:
    assert second.failed == {}
    assert second.changed[P] == []  # all of it was there
    assert second.changed[D] == [
        "Make its directories",
        "Place the programs",
        "Fetch what is missing",
    ]


def test_the_environment_is_whole_and_in_use(bench: Bench, second: Outcome) -> None:
    for host in (P, D):
        home = bench.runtime(host)
        assert home.startswith(f"{RUNTIMES}/cuda-")
        found = json.loads(bench[host].must("cat", f"{home}/complete.json"))
        assert "NixlPushConnector" in found["connectors"]
        # pip's cache is gone, and nothing belongs to root but the link that leads there.
        assert bench[host].must("find", RUNTIMES, "-not", "-user", layout.USER) == ""
        listed = bench[host].must("ls", "-A", RUNTIMES).split()
        assert sorted(listed) == sorted([Path(home).name, f"{Path(home).name}.lock"])
        owner = bench[host].must("stat", "-c", "%U", layout.RUNTIME).strip()
        assert owner == "root"


def test_the_model_of_this_machine_is_on_every_host(
    bench: Bench, second: Outcome, model: Path
) -> None:
    names = sorted([".kvdeploy-manifest.json", *(p.name for p in model.iterdir())])
    for host in (P, D):
        assert sorted(bench[host].must("ls", "-A", f"{layout.MODELS}/tiny").split()) == names
        assert bench[host].must("ls", "-A", layout.MODELS).split() == [".tiny.lock", "tiny"]
        same = bench[host].run("cmp", f"{layout.MODELS}/tiny/{WEIGHTS}", f"{SHARED}/{WEIGHTS}")
        assert same.returncode == 0
    assert bench.manifest(P)["digest"] == bench.manifest(D)["digest"]


@pytest.fixture(scope="module")
def other_lock(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same packages under another name: another environment."""
    lines = Path(bench.served.variables["vllm_lock"]).read_text().splitlines()
    lock = tmp_path_factory.mktemp("locks") / "other.txt"
    lock.write_text("\n".join(reversed(lines)))
    return lock


@pytest.fixture(scope="module")
def broken(bench: Bench, second: Outcome, other_lock: Path) -> Outcome:
    """A wheel that arrives cut short on one host, a package that no index has on the other."""
    unknown = other_lock.with_name("unknown.txt")
    unknown.write_text(f"no-such-package==1.0\n{other_lock.read_text()}")
    with bench.served.vendor.fault("truncated-wheel"):
        return bench.run(
            {P: {"vllm_lock": str(other_lock)}, D: {"vllm_lock": str(unknown)}}, "vllm"
        )


def test_a_wheel_that_is_cut_short_is_told(bench: Bench, broken: Outcome) -> None:
    index = bench.served.variables["vllm_pip_args"][1]
    assert index.endswith("/simple/")
    said = broken.failed[P]
    start, _, rest = said.partition("(")
    line, _, end = rest.rpartition(").")
    assert start == "prefill-0 has no environment for engines: a package arrived damaged "
    assert "is invalid" in line or "BadZipFile" in line or "not a zip" in line
    assert end == (
        " What pip had kept was thrown away: run this again, and look at the index when it happens "
        "twice."
    )


def test_a_package_that_no_index_has_is_told(broken: Outcome) -> None:
    assert broken.failed[D] == (
        "decode-0 has no environment for engines: pip's index has nothing for this Python "
        "(no-such-package==1.0). Check pip's configuration (/etc/pip.conf): PyTorch's CPU wheels "
        f"have an index of their own. {AGAIN}"
    )


def test_a_failed_build_leaves_the_environment_in_use(bench: Bench, broken: Outcome) -> None:
    for host in (P, D):
        in_use = bench.runtime(host)
        others = bench[host].must("ls", RUNTIMES).split()
        assert sum(name.startswith("cuda-") and not name.endswith(".lock") for name in others) == 2
        assert bench[host].must("find", RUNTIMES, "-name", "complete.json").split() == [
            f"{in_use}/complete.json"
        ]


def in_the_middle_of_a_build(host: Host, strike: Callable[[], None]) -> threading.Thread:
    def wait() -> None:
        busy = ("pgrep", "-u", layout.USER, "-f", "pip install")

        def one_is_busy() -> bool | None:
            return host.run(*busy).returncode == 0 or None

        if wait_for(one_is_busy, timeout_s=60, interval_s=0.05):
            strike()

    watch = threading.Thread(target=wait)
    watch.start()
    return watch


@pytest.fixture(scope="module")
def killed(bench: Bench, broken: Outcome, other_lock: Path) -> Outcome:
    """pip and what started it are killed on one host; the other is held to gates too high."""

    def kill() -> None:
        bench[P].must("pkill", "-9", "-u", layout.USER)

    bench[D].fault("no-gpu")
    watch = in_the_middle_of_a_build(bench[P], kill)
    outcome = bench.run(
        {
            P: {"vllm_lock": str(other_lock)},
            D: {"vllm_min_version": "99", "vllm_nixl_min_version": "98"},
        },
        "vllm",
    )
    watch.join()
    bench[D].heal("no-gpu")
    return outcome


def test_a_build_that_was_killed_is_told(killed: Outcome) -> None:
    assert killed.failed[P] == (
        "prefill-0 has no environment for engines: it ended with 137 (Killed); run this again, it "
        "goes on from here."
    )


def test_versions_that_are_too_old_are_told(bench: Bench, killed: Outcome) -> None:
    vllm, nixl = (
        pin.partition("==")[2]
        for name in ("vllm", "nixl")
        for pin in entries(Path(bench.served.variables["vllm_lock"]).read_text())
        if pin.startswith(f"{name}==")
    )
    assert killed.failed[D] == (
        f"decode-0 cannot run engines: the environment {bench.runtime(D)} is not fit: vllm {vllm} "
        f"will not do, 99 or newer is needed; nixl {nixl} will not do, 98 or newer is needed; "
        "torch finds no usable NVIDIA GPU (NVIDIA-SMI has failed because it couldn't communicate "
        "with the NVIDIA driver. Make sure that the latest NVIDIA driver is installed and running)."
    )


def test_a_half_installed_package_is_not_taken_for_a_whole_one(
    bench: Bench, killed: Outcome, other_lock: Path
) -> None:
    """What pip itself would take for installed: METADATA is there, half of the files are not."""
    before = bench.runtime(P)
    (home,) = (
        path
        for path in bench[P]
        .must("find", RUNTIMES, "-maxdepth", "1", "-name", "cuda-*", "-type", "d")
        .split()
        if path != before
    )
    site = f"{home}/lib/python3.*/site-packages"
    half = (
        f"cp -a {before}/lib/python3.*/site-packages/vllm* {site}/ && rm -r {site}/vllm/distributed"
    )
    bench[P].must("runuser", "-u", layout.USER, "--", "sh", "-c", half)
    outcome = bench.run({P: {"vllm_lock": str(other_lock)}}, "vllm")
    assert outcome.failed == {}
    assert bench.runtime(P) == home
    kept = bench[P].must("find", RUNTIMES, "-name", "complete.json").split()
    assert sorted(kept) == sorted([f"{before}/complete.json", f"{home}/complete.json"])


# --- models ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """s3://models/tiny, as the hosts reach it."""

    variables: dict[str, Any]


@pytest.fixture(scope="module")
def bucket(bench: Bench, second: Outcome, model: Path) -> Iterator[Bucket]:
    """The hosts build the real S3 client from the real lock."""
    server = ThreadedMotoServer(ip_address=bench.served.lab.gateway, port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    env = {
        "AWS_ENDPOINT_URL_S3": url,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
    }
    s3 = boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
    )
    s3.create_bucket(Bucket="models")
    for file in model.iterdir():
        s3.put_object(Bucket="models", Key=f"tiny/{file.name}", Body=file.read_bytes())
    variables = {
        "model_source": "s3",
        "model_id": "s3://models/tiny",
        "model_path": f"{layout.MODELS}/from-s3",
        "model_lock": str(LOCKS / "node.txt"),
        "model_environment": env,
    }
    s3.close()
    yield Bucket(variables=variables)
    server.stop()


OTHER_SOURCE: Final = {"model_source": "shared", "model_id": SHARED, "model_environment": {}}
"""Of one host, so that the S3 client is built once."""


@pytest.fixture(scope="module")
def from_s3(bench: Bench, bucket: Bucket) -> Outcome:
    return bench.run({P: {}, D: OTHER_SOURCE}, "model", **bucket.variables)


def test_a_model_comes_from_s3_and_is_the_same_wherever_it_came_from(
    bench: Bench, bucket: Bucket, from_s3: Outcome
) -> None:
    path = bucket.variables["model_path"]
    assert from_s3.failed == {}
    assert [bench.manifest(host, path)["id"] for host in (P, D)] == ["s3://models/tiny", SHARED]
    for host in (P, D):
        assert "Fetch what is missing" in from_s3.changed[host]
        assert bench[host].run("cmp", f"{path}/{WEIGHTS}", f"{SHARED}/{WEIGHTS}").returncode == 0


def test_damage_is_repaired_on_one_host_while_another_has_no_space(
    bench: Bench, bucket: Bucket, from_s3: Outcome
) -> None:
    """A file that is too short, and one whose length is right."""
    path = bucket.variables["model_path"]
    bench[P].must("truncate", "-s", "-1", f"{path}/{WEIGHTS}")
    bench[P].must("sed", "-i", "s/true/trve/", f"{path}/tokenizer.json")
    small = f"{layout.DATA}/small"
    mount = f"mkdir {small} && mount -t tmpfs -o size=1m,uid=$(id -u {layout.USER}) none {small}"
    bench[D].must("sh", "-c", mount)
    outcome = bench.run(
        {P: {"model_verify_hashes": True}, D: OTHER_SOURCE | {"model_path": f"{small}/tiny"}},
        "model",
        **bucket.variables,
    )
    assert outcome.failed == {
        D: f"decode-0 has no model: there is no space for the model: {small} needs 4.8 MiB more "
        "and has 1.0 MiB free. Remove models that are no longer used there, or use an instance "
        "type with larger disks."
    }
    assert outcome.changed[P] == ["Fetch what is missing"]
    for name in (WEIGHTS, "tokenizer.json"):
        assert bench[P].run("cmp", f"{path}/{name}", f"{SHARED}/{name}").returncode == 0


def test_hosts_with_different_weights_are_told(
    bench: Bench, bucket: Bucket, from_s3: Outcome
) -> None:
    """Push would give wrong answers. The host that has its model needs no network meanwhile."""
    path, other = bucket.variables["model_path"], "/srv/other"
    change = f"cp -r {SHARED} {other} && sed -i s/10000/20000/ {other}/config.json"
    bench[D].must("sh", "-c", change)
    nowhere = {"model_environment": {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}}
    outcome = bench.run(
        {P: nowhere, D: OTHER_SOURCE | {"model_id": other}}, "model", **bucket.variables
    )
    assert outcome.changed == {P: [], D: ["Fetch what is missing"]}
    mine, others = (bench.manifest(host, path)["digest"] for host in (D, P))
    assert mine != others
    assert outcome.failed == {
        D: f"decode-0 holds another model at {path} ({mine}) than prefill-0 ({others}): engines "
        "would give wrong answers. Its source has changed: run again with model_refresh, which "
        "fetches what differs, or pin model.revision."
    }


def test_a_model_comes_from_a_hub_and_the_token_stays_nowhere(
    bench: Bench, second: Outcome, model: Path
) -> None:
    path = f"{layout.MODELS}/from-hub"
    with run_hub("acme/small", model, bench.served.lab.gateway) as hub:
        outcome = bench.run(
            {P: {}, D: {"model_id": "acme/large"}},
            "model",
            secrets={"model_token": TOKEN},
            model_source="hub",
            model_id="acme/small",
            model_path=path,
            model_python="/usr/bin/python3",  # the engines' has it too, in a real environment
            model_environment={"HF_ENDPOINT": hub.url, "PYTHONPATH": HUB_LIBRARY},
        )
        assert TOKEN in hub.tokens
    assert outcome.failed == {
        D: "decode-0 has no model: cannot fetch 'acme/large' from the hub: there is no such model, "
        "or the token may not see it (RepositoryNotFoundError). Check model.id, model.revision, "
        "the token and the node's way out; or put the model into S3."
    }
    assert bench[P].run("cmp", f"{path}/{WEIGHTS}", f"{SHARED}/{WEIGHTS}").returncode == 0
    assert bench.manifest(P, path)["origin"] == "0" * 40  # the commit that was fetched
    assert TOKEN not in outcome.log
    for host in (P, D):
        places = ("/etc", "/home", "/opt", "/root", "/run", "/tmp", "/var")
        found = bench[host].run("grep", "-rlF", "--devices=skip", TOKEN, *places)
        assert found.stdout == ""


@pytest.fixture(scope="module")
def various(bench: Bench, second: Outcome) -> Outcome:
    """One run for what is decided at a glance."""
    here = {"model_source": "shared", "model_id": SHARED, "model_stage": False}
    return bench.run(
        {
            P: here,
            D: here | {"model_id": "/mnt/nowhere"},
            X: {"model_source": "s3", "model_id": "models/tiny"},
            Y: {"model_source": "none", "model_id": "", "model_path": "/opt/image/model"},
        },
        "model",
        model_path=f"{layout.MODELS}/in-place",
    )


def test_a_shared_folder_is_used_where_it_is(bench: Bench, various: Outcome) -> None:
    assert bench[P].must("readlink", f"{layout.MODELS}/in-place").strip() == SHARED
    assert various.failed[D] == (
        "decode-0 has no model: /mnt/nowhere on this node is no whole model: config.json is "
        "missing; it has no weights (*.safetensors). Check model.id."
    )


def test_a_model_id_that_does_not_fit_its_source_is_told(various: Outcome) -> None:
    assert various.failed[X] == (
        "decode-1 cannot stage a model: model_source s3 takes s3://BUCKET/PREFIX in model_id, and "
        "the client's lock in model_lock, and model_path is an absolute path; got model_id "
        '"models/tiny", model_path "/opt/kvdeploy/data/models/in-place" and no model_lock.'
    )


def test_a_model_that_an_image_should_have_is_told(various: Outcome) -> None:
    assert various.failed[Y] == (
        "decode-2 has no whole model at /opt/image/model: it is not there. Put it there, or name a "
        "source to fetch it from."
    )


# --- power loss: last, for it leaves the host off ----------------------------------------------
def test_a_host_that_dies_while_its_environment_is_built_is_not_waited_for(bench: Bench) -> None:
    struck: list[float] = []

    def power_off() -> None:
        bench[X].kill()
        struck.append(time.monotonic())

    watch = in_the_middle_of_a_build(bench[X], power_off)
    outcome = bench.run({X: {}}, "vllm")
    told = time.monotonic()
    watch.join()
    assert outcome.gone.startswith(f"runtime.yml: {X} ({bench[X].address}) is not reachable: ")
    assert told - struck[0] < TOLD_S
