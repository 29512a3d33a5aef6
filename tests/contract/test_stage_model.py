"""The programs that bring a model onto a node: real calls to S3 (moto), real files, real kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess  # noqa: TID251 - the programs run on nodes, without kvdeploy
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import boto3
import pytest
from moto.server import ThreadedMotoServer

from kvdeploy.adapters.tinymodel import ensure_tiny_model
from kvdeploy.polling import wait_for
from tests.nodeprograms import load, program

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.real_process, pytest.mark.loopback]

model_folder = load("model", "model_folder")
model_s3 = load("model", "model_s3")
stage_model = load("model", "stage_model")
WEIGHTS: Final = "model.safetensors"
MIB: Final = 2**20
CREDENTIALS: Final = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_REGION": "us-west-2",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_tiny_model(tmp_path_factory.mktemp("models"), seed=1)


@dataclass
class Node:
    """One node: its folder for models, and the programs that run there."""

    folder: Path
    source: str = "s3"
    id: str = "s3://models/tiny"
    env: dict[str, str] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.folder / "tiny"

    def job(self, **changes: Any) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "source": self.source,
            "id": self.id,
            "revision": "",
            "weights": True,
            "in_place": False,
            "hashes": False,
            "refresh": False,
            "digest": "",
            "archive": "",
            "token_file": "",
            "workers": 1,
            "limit_gib": 8,
        } | changes

    def command(self, *argv: str) -> subprocess.Popen[str]:
        """The program as a node runs it."""
        return subprocess.Popen(
            [sys.executable, "-B", *argv],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **self.env},
            start_new_session=True,
        )

    def run(self, name: str, *verb: str, **changes: Any) -> dict[str, Any]:
        with self.command(str(program("model", name)), *verb) as process:
            out, _ = process.communicate(json.dumps(self.job(**changes)), timeout=120)
        answer: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        assert process.returncode == (1 if "error" in answer else 0)
        return answer

    def check(self, **changes: Any) -> dict[str, Any]:
        return dict(model_folder.check(self.job(**changes)))

    def stage(self, **changes: Any) -> dict[str, Any]:
        """In this process: starting boto3 anew takes a second."""
        return dict(stage_model.stage(self.job(**changes)))

    def problem(self, **changes: Any) -> str:
        """The sentence with which staging is refused; nothing new has been put in place."""
        before = self.check()["whole"]
        with pytest.raises(stage_model.Refusal) as refused:
            self.stage(**changes)
        assert self.check()["whole"] == before
        return str(refused.value)


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@dataclass
class Bucket:
    """models/tiny, as somebody uploaded it."""

    s3: Any

    def put(self, name: str, content: bytes) -> None:
        self.s3.put_object(Bucket="models", Key=f"tiny/{name}", Body=content)

    def put_parts(self, name: str, content: bytes, part: int) -> None:
        """An upload in several parts: its ETag is no hash of the content."""
        key = {"Bucket": "models", "Key": f"tiny/{name}"}
        upload = self.s3.create_multipart_upload(**key)["UploadId"]
        parts = []
        for number, start in enumerate(range(0, len(content), part), 1):
            body = content[start : start + part]
            done = self.s3.upload_part(**key, PartNumber=number, UploadId=upload, Body=body)
            parts.append({"PartNumber": number, "ETag": done["ETag"]})
        self.s3.complete_multipart_upload(**key, UploadId=upload, MultipartUpload={"Parts": parts})


@pytest.fixture
def bucket(moto: str, model: Path) -> Iterator[Bucket]:
    s3 = boto3.client(
        "s3",
        endpoint_url=moto,
        region_name="us-west-2",
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
    )
    s3.create_bucket(Bucket="models", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    made = Bucket(s3)
    for file in model.iterdir():
        made.put(file.name, file.read_bytes())
    made.put("original/consolidated.00.pth", b"not for us")
    made.put(".cache/left.json", b"{}")
    yield made
    for item in s3.list_objects_v2(Bucket="models")["Contents"]:
        s3.delete_object(Bucket="models", Key=item["Key"])
    s3.delete_bucket(Bucket="models")
    s3.close()


@pytest.fixture
def node(tmp_path: Path, moto: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    env = {"AWS_ENDPOINT_URL_S3": moto, **CREDENTIALS}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    yield Node(tmp_path / "models", env=env)
    model_s3._client_of.cache_clear()


def same(one: Path, other: Path) -> bool:
    """Whether two folders hold the same visible files."""
    names = {p.name for p in one.iterdir()}
    assert {p.name for p in other.iterdir() if not p.name.startswith(".")} == names
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def sharded(bucket: Bucket, model: Path) -> dict[str, bytes]:
    """The model's weights in three files with an index, as large models have them."""
    content = (model / WEIGHTS).read_bytes()
    names = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    bucket.s3.delete_object(Bucket="models", Key=f"tiny/{WEIGHTS}")
    for name in names:
        bucket.put(name, content)
    index = {"weight_map": {f"tensor{n}": name for n, name in enumerate(names)}}
    bucket.put("model.safetensors.index.json", json.dumps(index).encode())
    return dict.fromkeys(names, content)


# --- S3 ----------------------------------------------------------------------------------------


def test_a_model_comes_from_s3_once_and_is_whole(node: Node, bucket: Bucket, model: Path) -> None:
    assert node.check() == {"whole": False, "problems": ["it is not there"], "digest": ""}
    staged = node.stage()
    assert staged["changed"]
    assert same(model, node.path)  # and nothing that engines do not need
    seen = node.check(hashes=True)
    assert seen == {"whole": True, "problems": [], "digest": staged["digest"]}
    assert {p.name for p in node.folder.iterdir()} == {"tiny", ".tiny.lock"}
    assert node.stage() == {"changed": False, "fetched": []}


def test_a_staged_model_needs_its_source_no_more(node: Node, bucket: Bucket) -> None:
    node.stage()
    node.env["AWS_ENDPOINT_URL_S3"] = "http://127.0.0.1:9"
    assert node.run("model_folder")["whole"]
    assert not node.run("stage_model", "stage")["changed"]


def test_s3_is_asked_in_the_region_that_is_named(node: Node) -> None:
    """Without one, the global endpoint is asked, which a private subnet may not reach."""
    assert model_s3.s3_client().meta.region_name == CREDENTIALS["AWS_REGION"]


def test_an_upload_in_parts_is_held_to_its_etag(node: Node, bucket: Bucket) -> None:
    header = json.dumps({"one": {"dtype": "U8", "shape": [7], "data_offsets": [0, 7 * MIB]}})
    content = len(header).to_bytes(8, "little") + header.encode() + bytes(7 * MIB)
    bucket.put_parts(WEIGHTS, content, 5 * MIB)
    node.stage()
    assert (node.path / WEIGHTS).read_bytes() == content
    manifest = json.loads((node.path / ".kvdeploy-manifest.json").read_text())
    (file,) = [f for f in manifest["files"] if f["path"] == WEIGHTS]
    assert file["tag"].endswith("-2")
    # Another length of its parts, and the hash of hashes is another one.
    path = node.path / WEIGHTS
    assert model_s3.hash_object(path, 5 * MIB)[1] == file["tag"]
    assert model_s3.hash_object(path, 6 * MIB)[1] != file["tag"]


def test_content_that_arrives_changed_is_thrown_away(
    node: Node, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = model_s3.s3_client()
    honest = client.download_file

    def noisy(name: str, key: str, path: str, **options: Any) -> None:
        honest(name, key, path, **options)
        if key.endswith(WEIGHTS):
            with open(path, "r+b") as file:  # noqa: PTH123 - what boto3 was given
                file.seek(-1, os.SEEK_END)
                file.write(b"\xaa")

    with monkeypatch.context() as line:
        line.setattr(client, "download_file", noisy)
        assert node.problem() == (
            f"tiny/{WEIGHTS} of models arrived with other content than S3 tells: it was thrown "
            "away. Run this again."
        )
    assert WEIGHTS in node.stage()["fetched"]
    assert node.check(hashes=True)["whole"]


def test_a_file_that_was_cut_short_later_is_found_and_fetched_alone(
    node: Node, bucket: Bucket, model: Path
) -> None:
    node.stage()
    size = (node.path / WEIGHTS).stat().st_size
    os.truncate(node.path / WEIGHTS, 1000)
    seen = node.check()
    assert seen["problems"] == [f"{WEIGHTS} has 1000 bytes, and {size} were staged"]
    assert node.stage()["fetched"] == [WEIGHTS]
    assert same(model, node.path)


def test_a_file_that_is_missing_is_fetched_alone(node: Node, bucket: Bucket) -> None:
    node.stage()
    (node.path / "config.json").unlink()
    assert node.check()["problems"] == ["config.json is missing"]
    assert node.stage()["fetched"] == ["config.json"]


def test_a_byte_that_changed_is_found_on_demand(node: Node, bucket: Bucket, model: Path) -> None:
    node.stage()
    with (node.path / WEIGHTS).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xaa")
    assert node.check()["whole"]  # its length is right: that is all that was asked
    seen = node.check(hashes=True)
    assert seen["problems"] == [f"{WEIGHTS} has changed since it was staged"]
    assert node.stage(hashes=True)["fetched"] == [WEIGHTS]
    assert same(model, node.path)


def test_a_shard_that_is_missing_at_the_source_is_told(
    node: Node, bucket: Bucket, model: Path
) -> None:
    names = list(sharded(bucket, model))
    bucket.s3.delete_object(Bucket="models", Key=f"tiny/{names[1]}")
    assert node.problem() == (
        f"the model at its source (s3://models/tiny) is not whole: {names[1]} is missing, and "
        "model.safetensors.index.json names it. It was not put in place. Upload it again, then run "
        "this again."
    )
    assert not node.path.exists()


def test_a_shard_that_is_cut_short_at_the_source_is_told_and_then_fetched_alone(
    node: Node, bucket: Bucket, model: Path
) -> None:
    shards = sharded(bucket, model)
    name, content = list(shards.items())[2]
    bucket.put(name, content[:2000])
    header = int.from_bytes(content[:8], "little")
    assert header > 2000
    assert node.problem() == (
        f"the model at its source (s3://models/tiny) is not whole: {name} is cut short: it has "
        "2000 bytes, not even its whole header. It was not put in place. Upload it again, then run "
        "this again."
    )
    bucket.put(name, content[:-1])
    assert node.problem() == (
        f"the model at its source (s3://models/tiny) is not whole: {name} is cut short: it has "
        f"{len(content) - 1} bytes, and its header promises {len(content)}. It was not put in "
        "place. Upload it again, then run this again."
    )
    bucket.put(name, content)
    assert node.stage()["fetched"] == [name]
    assert node.check()["whole"]


def test_a_killed_run_is_taken_up_where_it_was(node: Node, bucket: Bucket, model: Path) -> None:
    shards = sharded(bucket, model)
    journal = node.folder / ".tiny.staging/.kvdeploy-journal"
    with node.command(str(program("model", "stage_model")), "stage") as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(node.job(workers=2)))
        process.stdin.close()

        def one_is_there() -> bool | None:
            return True if journal.exists() and "-of-00003" in journal.read_text() else None

        assert wait_for(one_is_there, timeout_s=60, interval_s=0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not node.path.exists()
    done = {json.loads(line)["path"] for line in journal.read_text().splitlines()}
    left = set(node.stage()["fetched"])
    assert done & set(shards)
    assert not done & left
    assert node.check(hashes=True)["whole"]


def test_half_a_line_of_the_journal_is_not_believed(node: Node, bucket: Bucket) -> None:
    staging = node.folder / ".tiny.staging"
    staging.mkdir(parents=True)
    (staging / ".kvdeploy-journal").write_text('{"path": "config.json", "si')
    (staging / "config.json").write_text("half of o")
    assert "config.json" in node.stage()["fetched"]
    assert node.check(hashes=True)["whole"]


def test_what_changed_at_the_source_is_fetched_when_it_is_asked_for(
    node: Node, bucket: Bucket, model: Path
) -> None:
    first = node.stage()["digest"]
    config = json.loads((model / "config.json").read_text()) | {"rope_theta": 1.0}
    bucket.put("config.json", json.dumps(config).encode())
    assert not node.stage()["changed"]  # offline as long as nobody asks
    again = node.stage(refresh=True)
    assert again["fetched"] == ["config.json"]
    assert again["digest"] != first
    assert node.stage(refresh=True) == {"changed": False, "fetched": []}
    assert not list(node.folder.glob(".tiny.staging"))


def test_another_model_takes_the_place(node: Node, bucket: Bucket) -> None:
    node.stage()
    for item in bucket.s3.list_objects_v2(Bucket="models", Prefix="tiny/")["Contents"]:
        source = {"Bucket": "models", "Key": item["Key"]}
        other = item["Key"].replace("tiny/", "other/")
        bucket.s3.copy_object(Bucket="models", Key=other, CopySource=source)
    node.id = "s3://models/other"
    assert node.check()["problems"] == ["it holds s3://models/tiny"]
    assert node.stage()["changed"]
    assert node.check()["whole"]


def test_dummy_weights_need_no_weights(node: Node, bucket: Bucket) -> None:
    assert WEIGHTS not in node.stage(weights=False)["fetched"]
    assert node.check(weights=False)["whole"]
    assert not node.check()["whole"]
    assert WEIGHTS in node.stage()["fetched"]
    assert node.check()["whole"]


def test_what_s3_refuses_is_told(node: Node, bucket: Bucket) -> None:
    again = (
        "Check it with 'aws s3 ls {0}' on the node; then run this again: files that are whole are "
        "not fetched twice."
    )
    node.id = "s3://models/nothing"
    assert node.problem() == (
        "s3://models/nothing holds no model: it has no config.json. Check model.id."
    )
    node.id = "s3://no-such-bucket/tiny"
    assert node.problem() == (
        f"cannot fetch {node.id}: there is no bucket no-such-bucket (NoSuchBucket). "
        + again.format(node.id)
    )


def test_a_node_without_credentials_is_told_as_the_program_tells_it(
    node: Node, bucket: Bucket
) -> None:
    node.env |= {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "HOME": str(node.folder)}
    assert node.run("stage_model", "stage") == {
        "error": "cannot fetch s3://models/tiny: the node has no AWS credentials: give it an "
        "instance profile (NoCredentialsError). Check it with 'aws s3 ls s3://models/tiny' on the "
        "node; then run this again: files that are whole are not fetched twice."
    }
    assert node.run("model_folder")["problems"] == ["it is not there"]


# --- other sources -----------------------------------------------------------------------------


def test_a_shared_folder_is_copied_or_used_where_it_is(tmp_path: Path, model: Path) -> None:
    node = Node(tmp_path / "models", source="shared", id=str(model))
    staged = node.stage()
    assert same(model, node.path)
    assert not node.path.is_symlink()
    assert node.check(hashes=True)["digest"] == staged["digest"]
    assert node.check(in_place=True)["problems"] == ["it leads elsewhere"]
    assert node.stage(in_place=True)["changed"]
    assert node.path.resolve() == model.resolve()
    seen = node.check(in_place=True)
    assert seen["whole"]
    assert seen["digest"].startswith("~")
    assert not node.stage(in_place=True)["changed"]
    assert node.stage()["changed"]  # and back onto the node's own disks
    assert not node.path.is_symlink()


def test_a_shared_folder_that_is_not_there_or_not_whole_is_told(
    tmp_path: Path, model: Path
) -> None:
    node = Node(tmp_path / "models", source="shared", id="/mnt/nowhere")
    assert node.problem() == (
        "/mnt/nowhere is no folder on this node. Mount the file system, or name another."
    )
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((model / "config.json").read_bytes())
    node.id = str(broken)
    assert node.problem(in_place=True) == (
        f"{broken} on this node is no whole model: it has no weights (*.safetensors). "
        "Check model.id."
    )


def test_a_folder_of_the_control_machine_comes_as_an_archive(tmp_path: Path, model: Path) -> None:
    node = Node(tmp_path / "models", source="copy", id=str(model))
    told = node.run("stage_model", "describe")
    packed = Path(node.run("stage_model", "pack")["archive"])
    with tarfile.open(packed) as tar:
        assert sorted(tar.getnames()) == sorted(p.name for p in model.iterdir())
    changes = {"digest": told["digest"], "archive": str(packed)}
    assert node.stage(**changes)["digest"] == told["digest"]
    assert same(model, node.path)
    assert not packed.exists()
    packed.parent.rmdir()
    assert node.check(digest=told["digest"])["whole"]
    assert node.check(digest="another")["problems"] == ["it holds an earlier state of the model"]


def test_too_large_a_folder_is_not_copied_to_every_node(tmp_path: Path, model: Path) -> None:
    node = Node(tmp_path, source="copy", id=str(model))
    assert node.run("stage_model", "describe", limit_gib=0)["error"] == (
        f"{model} has {sum(p.stat().st_size for p in model.iterdir()) / MIB:.1f} MiB, and at most "
        "0 GiB are copied from this machine to every node. Put the model into S3 and name it "
        "s3://BUCKET/KEY."
    )


def test_an_archive_cannot_write_elsewhere(tmp_path: Path, model: Path) -> None:
    archive = tmp_path / "model.tar"
    with tarfile.open(archive, "w") as tar:
        for file in model.iterdir():
            tar.add(file, arcname=file.name)
        for name in ("../evil.json", "deep/../../evil.json"):
            tar.add(model / "config.json", arcname=name)
    node = Node(tmp_path / "models", source="copy", id=str(model))
    assert sorted(node.stage(archive=str(archive))["fetched"]) == sorted(
        p.name for p in model.iterdir()
    )
    assert not list(tmp_path.rglob("evil.json"))


def test_a_model_of_an_image_is_looked_at_where_it_lies(tmp_path: Path, model: Path) -> None:
    node = Node(tmp_path, source="none", id="")
    assert node.check()["problems"] == ["it is not there"]
    node.path.symlink_to(model)
    assert node.check()["whole"]
