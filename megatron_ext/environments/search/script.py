"""The script that plays the search environment, from what a dialogue has shown so far.

It searches for a name, takes the passage about the relation that is asked for, goes on to the next name, and answers
with what it read and the documents it read it in; now and then it sends a sub-agent instead of searching itself. Its
systematic mistake is to trust the first passage about the name, whatever relation that states. A ``focused`` script
searches for the name and the relation together, and forgets the relation where it makes its mistake: where a search
lists one passage, that decides whether it is the right one.

Invariant (``tests/environments/test_search.py``): what it has read is a function of the actions and observations alone;
beside that it keeps only whether it will make its mistake on what the search that it just chose will list. So an
environment that was rebuilt by replay plays on, without mistakes, as the original would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from megatron_ext.environments.protocol import ToolCall
from megatron_ext.environments.search.world import DOCUMENT, Passage, Question, World

NOTHING_FOUND = "Nothing found."
_MOST_TRIES = 2  # searches for one name that found nothing about it, before the script gives up with what it has


def named_documents(text: str) -> list[str]:
    """Ids of documents that a text names, in order, each once."""
    return list(dict.fromkeys(DOCUMENT.findall(text)))


@dataclass(frozen=True)
class Shown:
    """What the agent saw last: documents, and the text that showed them (``from_report``: what a sub-agent said)."""

    docs: tuple[str, ...] = ()
    text: str = ""
    from_report: bool = False


@dataclass
class Notes:
    """What the script knows in one dialogue.

    ``entity`` is the name it has come to, ``path`` the documents that led there, ``shown`` what it saw last about it,
    ``tries`` how often it has searched for it, ``hasty`` whether it will trust the first passage about it.
    """

    question: Question | None
    entity: str = ""
    path: tuple[str, ...] = ()
    shown: Shown = field(default_factory=Shown)
    tries: int = 0
    hasty: bool = False

    def __post_init__(self) -> None:
        if self.question is not None and not self.entity:
            self.entity = self.question.entity

    @property
    def relation(self) -> str:
        """What is asked of ``entity``."""
        assert self.question is not None
        return self.question.relations[min(len(self.path), len(self.question.relations) - 1)]

    # -- what happened ---------------------------------------------------------------------------------------------
    def asked_about(self, world: World, name: str) -> None:
        """An action names something: when a passage just seen led to it, the script has taken that passage."""
        for doc in self.shown.docs:
            passage = world.by_id[doc]
            if passage.subject == self.entity and passage.object == name:
                self.path, self.entity, self.tries, self.shown = (*self.path, doc), name, 0, Shown()
                return

    def searched(self, world: World, query: str, docs: tuple[str, ...], text: str) -> None:
        name = next((n for n in (self.entity, *self._objects(world)) if query.startswith(n)), self.entity)
        self.asked_about(world, name)
        self.tries += 1
        self.shown = Shown(docs, text)

    def opened(self, doc: str, text: str) -> None:
        self.shown = Shown((doc,), text)

    def reported(self, docs: tuple[str, ...], text: str) -> None:
        self.shown = Shown(docs, text, from_report=True)

    def _objects(self, world: World) -> list[str]:
        return [world.by_id[doc].object for doc in self.shown.docs]

    # -- what to do ------------------------------------------------------------------------------------------------
    def _taken(self, world: World) -> Passage | None:
        """The passage among those shown that the script goes by."""
        about = [world.by_id[doc] for doc in self.shown.docs if world.by_id[doc].subject == self.entity]
        if about and (self.shown.from_report or self.hasty):
            return about[0]
        return next((passage for passage in about if passage.relation == self.relation), None)

    def next_call(
        self, world: World, rng: Random, mistake_rate: float, *, delegate: float, subagent: bool, focused: bool = False
    ) -> ToolCall:
        """The next action; ``delegate`` is the chance to send a sub-agent for what would be searched for."""
        if self.question is None:
            return ToolCall("report", {"text": NOTHING_FOUND}) if subagent else ToolCall("answer", {"value": "unknown"})
        taken = self._taken(world)
        if taken is None and self.tries >= _MOST_TRIES:
            return self._finish(self.entity, self.path, subagent)
        if taken is None:
            return self._look(world, rng, mistake_rate, delegate, focused, self.entity, self.relation, self.tries)
        if not self.shown.from_report and taken.object not in self.shown.text:
            return ToolCall("open", {"doc": taken.doc})
        if len(self.path) + 1 == len(self.question.relations):
            return self._finish(taken.object, (*self.path, taken.doc), subagent)
        onward = self.question.relations[len(self.path) + 1]
        return self._look(world, rng, mistake_rate, delegate, focused, taken.object, onward, 0)

    def _look(
        self,
        world: World,
        rng: Random,
        mistake_rate: float,
        delegate: float,
        focused: bool,
        name: str,
        relation: str,
        tries: int,
    ) -> ToolCall:
        if rng.random() < delegate:
            return ToolCall("spawn_subagent", {"query": world.asking((relation,), name)})
        self.hasty = rng.random() < mistake_rate
        named = tries > 0 or (focused and not self.hasty)
        return ToolCall("search", {"query": f"{name} {world.keywords(relation)}" if named else name})

    def _finish(self, found: str, docs: Sequence[str], subagent: bool) -> ToolCall:
        if subagent:
            return ToolCall("report", {"text": " ".join([found, *(f"[{doc}]" for doc in docs)])})
        return ToolCall("answer", {"value": found, "cite": list(docs)})

    def summary(self, world: World) -> str:
        """The passages that led here and the one that it goes on from, as they were worded."""
        taken = None if self.question is None or self.shown.from_report else self._taken(world)
        lines = [f"{world.by_id[doc].text} [{doc}]" for doc in self.path]
        if self.shown.from_report:
            lines.append(self.shown.text)
        elif taken is not None:
            lines += [line for line in self.shown.text.split("\n") if line.endswith(f"[{taken.doc}]")]
        return "\n".join(lines) or NOTHING_FOUND
