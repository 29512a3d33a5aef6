from __future__ import annotations

import pytest

from kvdeploy.model.base import Change
from kvdeploy.model.schema import Key, all_keys, dotted, key_at
from kvdeploy.model.spec import TARGETS, ClusterSpec

KEYS = list(all_keys())


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.dotted)
def test_every_key_says_what_it_is_and_what_changing_it_costs(key: Key) -> None:
    assert key.doc
    assert isinstance(key.change, Change)


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.dotted)
def test_a_key_without_a_default_shows_how_it_looks(key: Key) -> None:
    if key.info.is_required() and key.path != ("name",):
        assert key.example
        assert key.fits_pattern(key.example)


@pytest.mark.parametrize("key", [k for k in KEYS if k.choices], ids=lambda key: key.dotted)
def test_the_words_about_a_choice_name_every_choice(key: Key) -> None:
    if key.dotted != "runtime.device":  # its words explain auto
        assert [c for c in key.choices if str(c) not in key.doc] == []


def test_the_targets_are_those_of_the_target_key() -> None:
    (target,) = (k for k in KEYS if k.path == ("target",))
    assert target.choices == TARGETS


def test_a_spec_needs_no_more_than_a_name() -> None:
    spec = ClusterSpec(name="demo")
    assert (spec.target, spec.fleet.prefill.count, spec.fleet.decode.count) == ("local", 1, 1)


def test_the_way_to_a_key_ends_at_the_deepest_one_that_is_known() -> None:
    found = key_at(("fleet", "prefill", "env", "PATH"))
    assert found is not None
    assert found.dotted == "fleet.prefill.env"
    assert key_at(("flet",)) is None


def test_a_place_in_a_list_is_shown_in_brackets() -> None:
    assert dotted(("aws", "network", "allowed_cidrs", 0)) == "aws.network.allowed_cidrs[0]"


@pytest.mark.parametrize("given", ["auto", 1, 7, None])
def test_prefill_at_once_is_a_number_or_auto(given: object) -> None:
    spec = ClusterSpec.model_validate({"name": "demo", "router": {"prefill_at_once": given}})
    assert spec.router.prefill_at_once == given
