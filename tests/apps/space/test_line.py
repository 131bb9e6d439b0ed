"""Races wait in line, and each visitor sees how long the wait can be."""

from __future__ import annotations

from hf_refspec.apps.space.conversation import Conversation
from hf_refspec.apps.space.line import Line
from hf_refspec.apps.space.race import Race


def clocked(race: Race, tokens: int, seconds: float) -> Race:
    """The race after so many tokens of each text, and so many seconds."""
    for lane in (race.plain, race.drafted):
        lane.ids, lane.seconds = [0] * tokens, seconds / 2
    return race


def test_a_wait_is_what_the_races_before_take_at_the_pace_of_the_first(host):
    line = Line()
    first, second, third = (Conversation().ask(host, "abc", 40) for _ in range(3))
    with line.place(first), line.place(second):
        assert line.wait(first) == ""
        assert line.wait(second) == "1 answer comes before yours."  # no pace yet
        clocked(first, tokens=10, seconds=5.0)
        assert line.wait(second) == "1 answer comes before yours: about 15 s at most."
        with line.place(third):
            assert line.wait(third) == "2 answers come before yours: about 35 s at most."
            clocked(first, tokens=30, seconds=15.0).drafted.completed = True  # it ends after 30
            assert line.wait(second) == "1 answer comes before yours: about 1 s at most."
    with line.place(second), line.place(third):  # whose pace is not known
        assert line.wait(third) == "1 answer comes before yours: about 20 s at most."
