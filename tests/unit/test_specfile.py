# ruff: noqa: E501 - messages are asserted whole, one a line, as people see them
from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kvdeploy.adapters import specfile
from kvdeploy.errors import SpecError
from kvdeploy.model.spec import ClusterSpec, FleetSpec
from kvdeploy.planning.template import render_cluster

if TYPE_CHECKING:
    from pathlib import Path

EVERYTHING_WRONG = """\
name: My Cluster
target: asw
model:
  id: ""
  dtype: bf16
  max_length: 10
  block_size: 3
  served_name: no
fleet:
  prefil: {count: 1}
  prefill:
    count: yes
    tp: 2
    engine_args: {a: , b: [1]}
    env: {A-B: x, C: 1}
  decode:
    count: "2"
    kv_cache_gib: 0
    tensor_parallel: 1.5
connector: {mode: oush, block_size: 100, lease_s: fast}
router:
  port: 80000
  port: 8001
  pair_header: "true"
  deadlines: 3
aws:
  zone: us-west-2
  network: {allowed_cidrs: [a, 3], vpc_id: 12}
  tags: [x]
  ttl_hours: 0
monitoring: {enabled: 1}
zzz: 1
"""

EVERYTHING_TOLD = """\
F:1: name: must be lower case letters, digits and dashes, 2-31 long, not 'My Cluster'
F:2: target: must be one of local or aws, not 'asw'. Did you mean aws?
F:4: model.id: must be text that is not empty, not ''
F:5: model.dtype: must be one of auto, bfloat16, float16 or float32, not 'bf16'. Did you mean bfloat16?
F:6: model.max_length: must be a whole number from 64 to 10000000, not 10
F:7: model.block_size: unknown key here; block_size belongs under connector
F:8: model.served_name: must be text, and YAML reads no as false; write "no"
F:10: fleet.prefil: unknown key. Did you mean prefill?
F:12: fleet.prefill.count: must be a whole number from 1 to 64, not yes
F:13: fleet.prefill.tp: unknown key. Did you mean tensor_parallel?
F:14: fleet.prefill.engine_args.a: must be true, a number, text, a list of texts or a map, but nothing is given; leave the line out for the default
F:14: fleet.prefill.engine_args.b: must be a list of texts only; put its numbers in quotes
F:15: fleet.prefill.env.A-B: not a variable's name: letters, digits and _, and no digit first
F:15: fleet.prefill.env.C: must be text, and YAML reads this as a number; put it in quotes
F:17: fleet.decode.count: must be a whole number from 1 to 64, not '2'; leave out the quotes
F:18: fleet.decode.kv_cache_gib: must be a number above 0 and at most 2048, not 0
F:19: fleet.decode.tensor_parallel: must be a whole number from 1 to 16, not 1.5
F:20: connector.mode: must be one of push or pull, not 'oush'. Did you mean push?
F:20: connector.block_size: must be one of 16, 32, 64, 128 or 256, not 100
F:20: connector.lease_s: must be a number from 5 to 3600, not 'fast'
F:23: router.port: is given twice, first on line 22; keep one
F:24: router.pair_header: must be true or false, not 'true'; leave out the quotes
F:25: router.deadlines: must be a map with keys of body_s, connect_s, prefill_s, first_token_s, inter_token_s, total_s, not 3
F:26: aws.region: is required: an AWS region, e.g. us-west-2
F:27: aws.zone: must be one availability zone: EFA does not cross zones, e.g. us-west-2a, not 'us-west-2'
F:28: aws.network.vpc_id: must be vpc-... of an existing VPC, not 12
F:28: aws.network.allowed_cidrs[1]: must be text, and YAML reads 3 as a number; write "3"
F:29: aws.tags: must be a map of keys and values, not a list
F:30: aws.ttl_hours: must be a number above 0, not 0
F:31: monitoring.enabled: must be true or false, not 1
F:32: zzz: unknown key. Good here: name, target, model, fleet, connector, router, runtime, aws, monitoring, state
31 problems in F"""


def load(tmp_path: Path, text: str | bytes, *overlays: str) -> ClusterSpec:
    path = tmp_path / "c.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return specfile.load(path, overlays=overlays).spec


def wrong(tmp_path: Path, text: str | bytes, *overlays: str) -> str:
    """What is said of a bad file, its name shortened to F."""
    with pytest.raises(SpecError) as e:
        load(tmp_path, text, *overlays)
    return e.value.message.replace(str(tmp_path / "c.yaml"), "F")


def test_without_a_file_there_is_a_cluster() -> None:
    loaded = specfile.load(None)
    assert loaded.spec == ClusterSpec(name="local")
    assert (loaded.source, loaded.text) == ("the built-in cluster", "name: local\n")


def test_every_problem_is_told_at_once_with_its_line(tmp_path: Path) -> None:
    assert wrong(tmp_path, EVERYTHING_WRONG) == EVERYTHING_TOLD


def test_the_validating_library_is_never_quoted(tmp_path: Path) -> None:
    told = wrong(tmp_path, EVERYTHING_WRONG).lower()
    assert "input should" not in told
    assert "pydantic" not in told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "F:1: is empty"),
        ("# nothing\n---\n", "F:1: is empty"),
        ("- name\n", "F:1: must hold keys such as name: and fleet:, not a list"),
        ("demo\n", "F:1: must hold keys such as name: and fleet:, not a single value"),
        ("name: demo\nmodel: {id: a\n", "F:3: not YAML: expected ',' or '}', but got '<stream end>'"),
        (
            "name: demo\nmodel: id: a\n",
            "F:2: not YAML: a ': ' where none may be; check the indentation, or quote the value",
        ),
        ("name: ab\nfleet:\n\tx: 1\n", "F:3: not YAML: a tab where none may be; indent with spaces"),
        ("name: ab\n---\nname: cd\n", "F:2: holds more than one document (---); keep one"),
        ("name: a\x00b\n", "F:1: not YAML: special characters are not allowed"),
        ("name: ab\nx: &x [*x]\n", "F:2: x[0]: holds itself"),
        ("name: !env HOME\n", "F:1: name: unknown tag !env; write a plain value"),
        ("name: !!binary aGk=\n", "F:1: name: unknown tag !!binary; write a plain value"),
        ("name: !!int x\n", "F:1: not YAML: a tag such as !!int does not fit its value"),
        ("? [a]\n: b\n", "F:1: a key must be one word"),
        ("x: .inf\n", "F:1: x: .inf is not a number that a cluster file may hold"),
        ("x: 1" + "0" * 50, "F:1: x: a number of more than 40 digits"),
        ('x: "\\ud800"\n', "F:1: x: holds half of a surrogate pair, which is no letter"),
        ("[" * 800, "F:1: is nested more than 32 deep"),
        ("name:\n", "F:1: name: must be lower case letters, digits and dashes, 2-31 long, but "
         "nothing is given"),
        ("name: 123\n", "F:1: name: must be lower case letters, digits and dashes, 2-31 long, "
         "not 123"),
        ("target: local\n", "F:1: name: is required: lower case letters, digits and dashes, 2-31 "
         "long"),
        (
            "name: demo\ntarget: aws\n",
            "F:2: target: aws needs a section aws with at least region and zone, e.g. aws: "
            "{region: us-west-2, zone: us-west-2a}",
        ),
        (
            "name: demo\nruntime: {port: 3}\n",
            "F:2: runtime.port: unknown key here; port belongs under router",
        ),
        (
            "name: demo\ncount: 3\n",
            "F:2: count: unknown key here; count belongs under fleet.prefill or fleet.decode",
        ),
        (
            "name: demo\nrouter: {target: aws}\n",
            "F:2: router.target: unknown key here; target belongs at the top level",
        ),
        (
            "name: demo\nfleet: {prefill: {env: {HF_TOKEN: [secret]}}}\n",
            "F:2: fleet.prefill.env.HF_TOKEN: must be text",
        ),
    ],
)  # fmt: skip
def test_one_problem_is_told_in_plain_words(tmp_path: Path, text: str, told: str) -> None:
    assert wrong(tmp_path, text) == f"{told}\n1 problem in F"


def test_a_missing_file_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as e:
        specfile.load(tmp_path / "none.yaml")
    assert e.value.message == f"{tmp_path}/none.yaml: no such file"
    assert e.value.hint == "Write one with 'kvdeploy init'."


def test_a_directory_is_no_cluster_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as e:
        specfile.load(tmp_path)
    assert e.value.message == f"{tmp_path}: is a directory"


def test_a_file_below_a_file_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("name: demo\n")
    with pytest.raises(SpecError) as e:
        specfile.load(tmp_path / "c.yaml" / "d.yaml")
    assert e.value.message == f"{tmp_path}/c.yaml/d.yaml: cannot be read: Not a directory"


def test_a_file_that_is_not_utf8_is_named_with_its_line(tmp_path: Path) -> None:
    assert wrong(tmp_path, b"name: demo\nmodel: {id: caf\xe9}\n") == (
        "F:2: is not UTF-8 text: byte 0xe9"
    )


def test_a_large_file_is_refused(tmp_path: Path) -> None:
    assert wrong(tmp_path, b"#" * (1024 * 1024 + 1)) == (
        "F: is larger than 1 MiB, so it is no cluster file"
    )


@pytest.mark.parametrize("form", ["[{}]", "{{<<: [{}]}}"])
def test_aliases_that_multiply_are_refused_before_they_are_built(tmp_path: Path, form: str) -> None:
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{i}: &a{i} {form.format(','.join([f'*a{i - 1}'] * 10))}" for i in range(1, 12)]
    assert "holds more than 100,000 values" in wrong(tmp_path, "\n".join(lines))


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    assert load(tmp_path, b"\xef\xbb\xbfname: demo\n").name == "demo"


def test_a_section_with_every_key_commented_out_has_its_defaults(tmp_path: Path) -> None:
    text = "name: demo\nrouter:\nfleet:\n  decode:\n    engine_args:\naws:\n"
    assert load(tmp_path, text) == ClusterSpec(name="demo")


def test_anchors_and_merges_work_and_errors_name_the_anchor(tmp_path: Path) -> None:
    text = "name: demo\nfleet:\n  prefill: &e {count: 2}\n  decode: {<<: *e, tensor_parallel: 2}\n"
    spec = load(tmp_path, text)
    assert spec.fleet.decode == FleetSpec(count=2, tensor_parallel=2)
    assert wrong(tmp_path, text.replace("count: 2", "count: 99")) == (
        "F:3: fleet.prefill.count: must be a whole number from 1 to 64, not 99\n"
        "F:3: fleet.decode.count: must be a whole number from 1 to 64, not 99\n"
        "2 problems in F"
    )


def test_a_key_may_look_like_a_number_and_a_date_is_text(tmp_path: Path) -> None:
    text = (
        "name: demo\nmodel: {served_name: 2026-01-02}\n"
        'aws: {region: us-west-2, zone: us-west-2a, tags: {1: a, on: "b"}}\n'
    )
    spec = load(tmp_path, text)
    assert spec.model.served_name == "2026-01-02"
    assert spec.aws is not None
    assert spec.aws.tags == {"1": "a", "on": "b"}


def test_an_overlay_wins_over_the_file_at_any_depth(tmp_path: Path) -> None:
    text = "name: demo\nfleet:\n  decode: {count: 3, env: {A: x}}\n"
    spec = load(tmp_path, text, "fleet.decode.env={B: y}", "router.port=9000", "model.id=a=b")
    assert spec.fleet.decode == FleetSpec(count=3, env={"B": "y"})
    assert spec.router.port == 9000
    assert spec.model.id == "a=b"


def test_a_later_overlay_wins(tmp_path: Path) -> None:
    assert load(tmp_path, "name: demo\n", "router.port=1", "router.port=2").router.port == 2


@pytest.mark.parametrize("path", ["fleet.decode", "fleet.decode.count", "fleet", "router.port"])
def test_null_puts_the_default_back(tmp_path: Path, path: str) -> None:
    text = "name: demo\nfleet: {decode: {count: 3}}\nrouter: {port: 9000}\n"
    spec = load(tmp_path, text, f"{path}=null")
    assert (spec.fleet.decode.count, spec.router.port) == (
        (3, 8000) if path == "router.port" else (1, 9000)
    )


def test_null_makes_no_section(tmp_path: Path) -> None:
    assert load(tmp_path, "name: demo\n", "aws.ami=null").aws is None


def test_an_overlay_leaves_the_other_end_of_an_anchor_alone(tmp_path: Path) -> None:
    text = "name: demo\nfleet: {prefill: &e {count: 2}, decode: *e}\n"
    spec = load(tmp_path, text, "fleet.decode.count=5")
    assert (spec.fleet.prefill.count, spec.fleet.decode.count) == (2, 5)


@pytest.mark.parametrize(
    ("overlay", "told"),
    [
        ("fleet.prefil.count=2", "fleet.prefil: unknown key. Did you mean prefill?"),
        ("fleet.prefil=null", "fleet.prefil: unknown key. Did you mean prefill?"),
        ("router.port=x", "router.port: must be a whole number from 1 to 65535, not 'x'"),
        (
            "router.prefill_at_once=0",
            "router.prefill_at_once: must be auto or a whole number from 1 to 100000, not 0",
        ),
        (
            "router.prefill_at_once=Aut",
            "router.prefill_at_once: must be auto or a whole number from 1 to 100000, not 'Aut'. "
            "Did you mean auto?",
        ),
        ("model.served_name=no", 'model.served_name: must be text, and YAML reads no as false; write "no"'),
        ("name.x=1", "name: must be lower case letters, digits and dashes, 2-31 long, not a map"),
        ("name=null", "name: is required: lower case letters, digits and dashes, 2-31 long"),
        ("router.port=[1", "router.port: not YAML: expected ',' or ']', but got '<stream end>'"),
        ("=1", "has an empty word in its path; write PATH=VALUE, e.g. router.port=8080"),
        ("a..b=1", "has an empty word in its path; write PATH=VALUE, e.g. router.port=8080"),
        ("router.port", "has no '='; write PATH=VALUE, e.g. fleet.prefill.count=2"),
        ("aws.region=us-west-2", "aws.zone: is required: one availability zone: EFA does not cross zones, e.g. us-west-2a"),
        ("target=aws", "target: aws needs a section aws with at least region and zone, e.g. aws: {region: us-west-2, zone: us-west-2a}"),
    ],
)  # fmt: skip
def test_a_bad_overlay_is_named_in_the_place_of_a_line(
    tmp_path: Path, overlay: str, told: str
) -> None:
    assert wrong(tmp_path, "name: demo\n", overlay) == f"--set {overlay}: {told}\n1 problem in F"


def test_a_bad_overlay_shows_no_value_of_a_variable(tmp_path: Path) -> None:
    assert wrong(tmp_path, "name: demo\n", "fleet.prefill.env.HF_TOKEN=12345") == (
        "--set fleet.prefill.env.HF_TOKEN=...: fleet.prefill.env.HF_TOKEN: must be text, and YAML "
        "reads this as a number; put it in quotes\n1 problem in F"
    )


def test_problems_of_file_and_overlays_come_in_one_list(tmp_path: Path) -> None:
    told = wrong(tmp_path, "name: demo\nrouter: {port: 0}\n", "nonsense", "fleet.decode.count=0")
    assert told == (
        "F:2: router.port: must be a whole number from 1 to 65535, not 0\n"
        "--set nonsense: has no '='; write PATH=VALUE, e.g. fleet.prefill.count=2\n"
        "--set fleet.decode.count=0: fleet.decode.count: must be a whole number from 1 to 64, not 0\n"
        "3 problems in F"
    )


def test_the_built_in_cluster_takes_overlays_and_names_them() -> None:
    assert specfile.load(None, overlays=["fleet.decode.count=2"]).spec.fleet.decode.count == 2
    with pytest.raises(SpecError) as e:
        specfile.load(None, overlays=["fleet.decode.count=0"])
    assert e.value.message == (
        "--set fleet.decode.count=0: fleet.decode.count: must be a whole number from 1 to 64, not "
        "0\n1 problem in the built-in cluster"
    )


@pytest.mark.parametrize(
    "text",
    [
        "name: demo\n",
        "rooter: 3\nname: demo\n",
        "name: demo # ours\nmodel: {\n",
        "name: demo\n\tx: 1",
    ],
)
def test_the_name_is_found_in_a_broken_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    assert specfile.name_in(tmp_path / "c.yaml") == "demo"


@pytest.mark.parametrize("text", ["", "a: 1\n", "name: 3\n", "name: ../x\n", "name: X\n{", "- 1\n"])
def test_a_file_without_a_good_name_names_no_cluster(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(SpecError) as e:
        specfile.name_in(tmp_path / "c.yaml")
    assert e.value.message == f"{tmp_path}/c.yaml: names no cluster"


def test_no_damage_to_a_file_ends_in_anything_but_a_spec_error(tmp_path: Path) -> None:
    chance = random.Random(7)
    bits = [*"{}[]:,#&*!|>'\"%@`-?\t\n =~<", "null", "yes", "1e9", ".nan", "<<: *a", "&a ", "*a"]
    bits += ["!!set {a}", "!!omap [a: 1]", "!!float x", "!!bool x", "0x", "1:30", "\u2028", "\x85"]
    bits += ["\x00", "\ud7ff", "\ufeff", "'\\ud800'", "? ", "---\n", "...\n", "-1", "9" * 5000, "é"]
    path = tmp_path / "c.yaml"
    for base in (render_cluster("local", "demo"), render_cluster("aws", "demo"), EVERYTHING_WRONG):
        lines = [part for part in base.splitlines() if not part.strip().startswith("#")]
        for _ in range(60):
            text = "\n".join(line.split(" #")[0].rstrip() for line in lines)
            for _ in range(chance.randint(1, 3)):
                at, length = chance.randrange(len(text)), chance.choice([0, 0, 1, 5, 30])
                text = text[:at] + chance.choice(bits) + text[at + length :]
            path.write_bytes(text.encode())
            try:
                specfile.load(path, overlays=[chance.choice(bits), f"a={chance.choice(bits)}"])
            except SpecError as e:
                assert "input should" not in e.message.lower()  # noqa: PT017 - both ends are fine
