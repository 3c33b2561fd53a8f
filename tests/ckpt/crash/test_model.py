"""Every state of the restart protocol, in all orders of events; and exploration does find mistakes."""

import pytest

from tests.ckpt.crash.model import Bug, Model, Violation, explore
from tests.support.selection import FULL

_MODELS = {
    "three ranks": Model(world=3, epochs=1, crashes=1),
    "two epochs": Model(world=2, epochs=2, crashes=1),
    "two saves": Model(world=2, epochs=1, steps=2, crashes=1),
}
_LARGE = {
    "two saves, two crashes": Model(world=2, epochs=1, steps=2, crashes=2),
    "three ranks, three crashes": Model(world=3, epochs=1, crashes=3),
    "two epochs, two crashes": Model(world=2, epochs=2, crashes=2),
    "three ranks, two epochs": Model(world=3, epochs=2, crashes=2),
}


@pytest.mark.timeout(900 if FULL else 60)
@pytest.mark.parametrize("drain", [True, False], ids=["drain", "abort"])
@pytest.mark.parametrize("name", [*_MODELS, *(_LARGE if FULL else ())])
def test_no_reachable_state_violates_the_invariants(name: str, drain: bool) -> None:
    model = (_MODELS | _LARGE)[name]
    states = explore(Model(model.world, model.steps, model.epochs, model.crashes, drain))
    print(f"{states} states")
    assert states > 100


@pytest.mark.parametrize("bug", [bug for bug in Bug if bug is not Bug.NONE], ids=lambda bug: bug.name.lower())
def test_a_protocol_with_a_mistake_is_found_out(bug: Bug) -> None:
    with pytest.raises(Violation) as caught:
        explore(Model(world=2, epochs=2, crashes=1, bug=bug))
    print(caught.value)
