"""What is asked of nodes beside jobs, of all at once or of one. None is waited for long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from protocol import KvrelayError, Node, NodeReport, PauseMode
from router.roster import Member, Roster

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")

CALL_TIMEOUT_S = 10.0  # a node takes a job, or says no, within this
_STATUS_TIMEOUT_S = 2.0  # whoever asks for the health of the cluster does not wait for long


async def ask(
    member: Member, what: str, answer: Awaitable[AnswerT], timeout_s: float | None = None
) -> AnswerT | None:
    """None, and a warning, if the node is lost or takes too long."""
    timeout_s = timeout_s or CALL_TIMEOUT_S
    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except TimeoutError:
        problem = f"no answer within {timeout_s:g} s"
    except KvrelayError as error:
        problem = str(error)
    level = logging.DEBUG if member.lost.is_set() else logging.WARNING
    logger.log(level, "%s was asked for %s: %s", member.node_id, what, problem)
    return None


class Orders:
    """To all nodes of a roster. A pause holds for those that come later as well."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._paused: PauseMode | None = None

    async def reports(self) -> list[NodeReport]:
        return await asyncio.gather(*map(self._report, self._roster))

    async def _report(self, member: Member) -> NodeReport:
        """Without its status if it does not answer: it has died, or is stopped, or very busy."""
        status = await ask(member, "its status", member.node.status(), timeout_s=_STATUS_TIMEOUT_S)
        return NodeReport(member.info, status)

    async def pause(self, mode: PauseMode) -> dict[str, bool]:
        self._paused = mode
        return await self._tell_all("a pause", lambda node: node.pause(mode))

    async def resume(self) -> dict[str, bool]:
        self._paused = None
        return await self._tell_all("going on", lambda node: node.resume())

    async def reset_prefix_cache(self, *, reset_running_requests: bool) -> dict[str, bool]:
        return await self._tell_all(
            "a reset",
            lambda node: node.reset_prefix_cache(reset_running_requests=reset_running_requests),
        )

    async def welcome(self, member: Member) -> None:
        """What holds for all nodes holds for this one, which has just come."""
        if self._paused is not None:
            await ask(member, "a pause", member.node.pause(self._paused))

    async def _tell_all(
        self, what: str, tell: Callable[[Node], Awaitable[bool | None]]
    ) -> dict[str, bool]:
        """By node id: whether the node has done it. One that only returns has."""

        async def carried_out(node: Node) -> bool:
            return await tell(node) is not False

        members = list(self._roster)
        asked = (ask(member, what, carried_out(member.node)) for member in members)
        answers = await asyncio.gather(*asked)
        return {m.node_id: bool(done) for m, done in zip(members, answers, strict=True)}
