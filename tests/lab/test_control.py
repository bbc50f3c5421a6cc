"""`Awaited`, a result that a thread sets once, waited for from cells, tasks and loops; and a run's state transitions."""

from __future__ import annotations

import asyncio
import threading

import pytest

from fsdp_lab.runs.control import RunControl
from fsdp_lab.runs.view import Awaited, RunState


class Answer(Awaited[int]):
    def __init__(self) -> None:
        super().__init__()
        self.given_up: list[bool] = []

    def _outcome(self) -> int:
        return 42

    def _given_up(self, blocking: bool) -> None:
        self.given_up.append(blocking)


def test_a_cancelled_task_does_not_end_it_for_the_others():
    answer = Answer()

    async def cell() -> int:
        async def waiting() -> int:
            return await answer

        first, second = asyncio.create_task(waiting()), asyncio.create_task(waiting())
        await asyncio.sleep(0)  # both wait
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert not answer.done and answer.given_up == [False]
        threading.Thread(target=answer._end).start()
        return await second

    assert asyncio.run(cell()) == 42 and answer.done


def test_it_is_waited_for_from_any_loop_and_ended_once(caplog: pytest.LogCaptureFixture):
    """A loop that was closed meanwhile is no error."""
    answer = Answer()
    with pytest.raises(TimeoutError, match="was not over after 0 s"):
        answer.wait(0)

    async def left() -> None:
        asyncio.create_task(answer._wait_async())  # noqa: RUF006  (cancelled when the loop closes)
        await asyncio.sleep(0)

    async def cell() -> int:
        return await answer

    asyncio.run(left())
    answer._end()
    answer._end()
    assert answer.wait() == asyncio.run(cell()) == asyncio.run(cell()) == 42 and not caplog.records


def test_a_transition_that_is_not_in_the_table_is_refused():
    control = RunControl()
    control.request_stop("enough")
    control.request_stop("again")
    assert (control.state, control.reason, control.ending) == (RunState.STOPPING, "enough", True)
    with pytest.raises(RuntimeError, match="cannot change from STOPPING to RUNNING"):
        control.set_state(RunState.RUNNING)
    control.finish(RunState.STOPPED, "enough")
    control.request_stop("too late")
    with pytest.raises(RuntimeError, match="from STOPPED to RECOVERING"):
        control.set_state(RunState.RECOVERING)
    assert (control.state, control.reason) == (RunState.STOPPED, "enough")
