"""Every state of the ownership protocol, in all orders of events; and exploration does find mistakes.

TESTS=full explores the large setups, too.
"""

import pytest

from tests.ckpt.crash.ownership_model import Setup, Violation, explore_ownership
from tests.ckpt.crash.ownership_state import Bug
from tests.support.selection import FULL

_SETUPS = {
    "two ranks": Setup(),
    "two ranks that only stall": Setup(saves=2, crashes=False),
    "an incomplete save is left, jobs only stall": Setup(ranks=1, left="incomplete", crashes=False),
    "a reader": Setup(ranks=1, reader=True, reuse=True),
}
_LARGE = {
    "an incomplete save is left": Setup(ranks=1, left="incomplete"),
    "two ranks, a complete save is left": Setup(left="complete"),
    "two ranks, a reader": Setup(reader=True, reuse=True),
    "two ranks, any step": Setup(steps=2, any_step=True, left="incomplete"),
    "three jobs that only stall": Setup(jobs=3, ranks=1, crashes=False),
    "two ranks, two saves": Setup(saves=2, reuse=True),
}
_FOUND_IN = {
    Bug.ADOPT_WITHOUT_CLAIM: Setup(ranks=1, left="incomplete"),
    Bug.CLAIM_ON_AN_OLD_VIEW: Setup(ranks=1, left="incomplete"),
    Bug.DECIDE_EVERYTHING: Setup(ranks=1, left="incomplete"),
    Bug.SUPERSEDE_FIRST: Setup(ranks=1, crashes=False),
    Bug.VERIFY_BEFORE_READING: Setup(reader=True, reuse=True, crashes=False),
    Bug.OVERWRITE_WITH_INTENT: Setup(reader=True, reuse=True, crashes=False),
    Bug.FENCED_WRITER_ABANDONS: Setup(ranks=1),
    Bug.REMOVE_UNSEEN: Setup(ranks=1, saves=2, crashes=False),
}
_LOOKS = [Bug.NO_LOOK_AT_PUBLISH, Bug.LOOK_BEFORE_MAKING]


@pytest.mark.timeout(900 if FULL else 60)
@pytest.mark.parametrize("name", [*_SETUPS, *(_LARGE if FULL else ())])
def test_no_reachable_state_violates_the_invariants(name: str) -> None:
    states = explore_ownership((_SETUPS | _LARGE)[name])
    print(f"{states} states")
    assert states > 5000


@pytest.mark.parametrize("bug", _FOUND_IN, ids=lambda bug: bug.name.lower())
def test_a_protocol_with_a_mistake_is_found_out(bug: Bug) -> None:
    with pytest.raises(Violation) as caught:
        explore_ownership(_FOUND_IN[bug]._replace(bugs=frozenset({bug})))
    print(caught.value)


@pytest.mark.parametrize("bug", _LOOKS, ids=lambda bug: bug.name.lower())
def test_each_look_at_the_token_makes_up_for_the_other(bug: Bug) -> None:
    """A pending directory that was made before a claim is seen by the claimer, and then the rename decides."""
    assert explore_ownership(Setup(ranks=1, bugs=frozenset({bug}))) > 5000


def test_without_both_looks_a_fenced_save_is_published() -> None:
    with pytest.raises(Violation, match="is published after the owner 2 has relied on there being no more"):
        explore_ownership(Setup(ranks=1, bugs=frozenset(_LOOKS)))
