import pytest

from ckpt.async_calls.writer_main import CODEC
from ckpt.keeper.messages import Finished, Notice
from ckpt.ranks.failure import clip
from inprocess.ipc.packets import PacketError


def test_the_largest_answer_fits() -> None:
    nasty = "\x00\U0001f600\ud800" * 100_000
    data = CODEC.encode(Finished(2**62, 2**62, 2**62, clip(nasty, 4096), clip(nasty, 32768)))
    assert len(data) < 40_000


@pytest.mark.parametrize("text", ["", "short", "x" * 5000, "\U0001f600" * 5000, "a" * 4000 + "\x00" * 4000])
def test_clip_keeps_both_ends(text: str) -> None:
    clipped = clip(text, 1000)
    assert clipped == text or ("cut" in clipped and clipped[0] == text[0] and clipped[-1] == text[-1])


def test_event_must_be_small_json() -> None:
    with pytest.raises(PacketError, match="JSON"):
        CODEC.encode(Notice(0, {"x": object()}))
    with pytest.raises(PacketError, match="limit"):
        CODEC.encode(Notice(0, {"x": "y" * 200_000}))
