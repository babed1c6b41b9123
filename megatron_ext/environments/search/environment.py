"""Questions about a generated library, answered by searching it, with documents cited and sub-agents sent.

Tools: ``search(query)`` (BM25), ``open(doc)``, ``answer(value, cite)``; ``spawn_subagent(query)`` opens a dialogue of
its own in which ``report(text)`` takes the place of ``answer`` and ends it.

Invariants (``tests/environments/test_search.py`` and ``test_contract.py``):

1. A citation counts only when this dialogue saw the document before: a search listed it, it was opened, or the report
   of a sub-agent that saw it names it. Others are refused by an observation (or count as wrong).
2. A tool that does not belong into the dialogue is answered by an observation and changes nothing.
3. Tasks of different splits share no name and no layout (which documents hold the answer, in which order); every word
   of a name is trained.
4. A world and its index are made once in a process.

At the end ``info`` has ``citation_f1`` (of the cited against the gold documents), ``grounded`` (the same, 0 for a wrong
answer), ``cited`` and ``subagents`` (how many were sent). How much text a search shows decides how soon a dialogue
outgrows its context budget, which is the harness's matter: ``results``, ``snippet_words`` and ``filler`` set it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from random import Random
from typing import Any

from megatron_ext.environments.corpus import scripted_texts
from megatron_ext.environments.protocol import (
    Action,
    EnvironmentEnded,
    Observation,
    SessionChange,
    ToolCall,
    ToolSpec,
    stable_hash,
)
from megatron_ext.environments.search.script import Notes, named_documents
from megatron_ext.environments.search.world import ONE_HOP, TWO_HOPS, Question, World, WorldShape, terms, world
from megatron_ext.environments.splits import SplitScan, check_split
from megatron_ext.trajectory.task import Task

_ARTICLES = frozenset(("a", "an", "the"))
_MOST_QUERY = 300  # characters of a query or report that are looked at


class Refused(ValueError):
    """A call that cannot be carried out; the message is what the agent sees."""


@dataclass
class Dialogue:
    """One session: documents that it may cite, and what the script knows in it."""

    notes: Notes
    seen: set[str] = field(default_factory=set)

    def copy(self) -> Dialogue:
        return Dialogue(copy(self.notes), set(self.seen))


@dataclass(frozen=True)
class Limits:
    """What a task allows: sub-agents of one episode (0: no such tool), results of a search, the words of a passage that
    a result shows (0: all), and whether a citation of what was not retrieved is refused."""

    subagents: int
    results: int
    snippet_words: int
    refuse_citations: bool


class Search:
    """Tasks with the tools ``search``, ``open``, ``answer`` and, with sub-agents, ``spawn_subagent`` and ``report``."""

    def __init__(
        self,
        hops: Sequence[int] = (2,),
        passages: int = 200,
        distractors: float = 0.1,
        results: int = 3,
        snippet_words: int = 0,
        wordings: int = 1,
        filler: int = 0,
        mark: str = "",
        subagents: int = 4,
        subagent_prompt: str = "Find out, then report what you found and the documents that say so: {query}",
        delegate: float = 0.3,
        focused: bool = False,
        refuse_citations: bool = True,
        worlds: int = 64,
        words: int = 24,
        seed: int = 5,
    ) -> None:
        """
        Args:
            hops: lengths of the questions, 1 and 2; each is drawn equally often.
            passages, distractors, wordings, filler, mark, words, seed: see ``WorldShape``.
            results: passages that a search lists.
            snippet_words: words of a passage that a search shows; 0 = all, so that ``open`` is not needed.
            subagents: sub-agents that one episode may send; 0 = none, and no tool for it.
            subagent_prompt: what a sub-agent is told; ``{query}`` is what its parent asked for.
            delegate: how often the script sends a sub-agent where it could search.
            focused: the script searches for a name and what is asked of it, not for the name alone.
            refuse_citations: an answer that cites what was not retrieved is refused; otherwise it is taken, and the
                citation counts as a wrong one.
            worlds: worlds of each split; tasks are spread over them.
        """
        if not hops or not set(hops) <= {1, 2}:
            raise ValueError(f"search.hops must hold 1, 2 or both, got {list(hops)}")
        if results < 1 or snippet_words < 0 or subagents < 0 or worlds < 1:
            raise ValueError("search: results >= 1, worlds >= 1, snippet_words >= 0 and subagents >= 0 are needed")
        if not 0 <= delegate < 1:
            raise ValueError(f"search.delegate must be in 0..1 (1 excluded), got {delegate}")
        if "{query}" not in subagent_prompt:
            raise ValueError("search.subagent_prompt must hold {query}, the place of what is asked")
        self._shape = WorldShape(passages, distractors, wordings, filler, mark, words, seed)
        self._chains = [chain for n in sorted(set(hops)) for chain in (ONE_HOP if n == 1 else TWO_HOPS)]
        self._limits = Limits(subagents, results, snippet_words, refuse_citations)
        self._prompt = subagent_prompt
        self._delegate, self._focused = delegate if subagents else 0.0, focused
        self._worlds = worlds
        self._tools = _tools(subagents > 0)
        self._scans: dict[str, SplitScan] = {}
        self._world: World | None = None
        self._question: Question | None = None
        self._stack: list[Dialogue] = []
        self._sent = 0
        self._done = False

    # -- tasks -----------------------------------------------------------------------------------------------------
    def _make(self, seed: int, split: str) -> tuple[World, Question]:
        """World and question of a seed."""
        place = world(self._shape, split, seed % self._worlds)
        rng = Random(int(stable_hash("search question", str(self._shape.seed), str(seed))[:15], 16))
        chain = rng.choice(self._chains)
        return place, place.question(chain, rng.choice(place.starts[chain]))

    def tasks(self, split: str, count: int, *, start: int = 0) -> Sequence[Task]:
        """``data``: ``answer`` and ``gold``, the ids of the documents that hold it."""
        scan = self._scans.setdefault(split, SplitScan(split))
        for seed in scan.until(start + count):
            question = self._make(seed, split)[1]
            layout = "/".join([*question.relations, *question.gold])
            scan.offer(seed, layout, question.text)
        tasks = []
        for seed in scan.seeds[start : start + count]:
            question = self._make(seed, split)[1]
            data = {"answer": question.answer, "gold": list(question.gold)}
            tasks.append(Task(f"search/{split}/{seed}", "search", seed, split, data))
        return tasks

    # -- protocol --------------------------------------------------------------------------------------------------
    def reset(self, seed: int, *, split: str = "train", data: Mapping[str, Any] | None = None) -> Observation:
        self._world, self._question = self._make(seed, check_split(split))
        self._stack = [Dialogue(Notes(self._question))]
        self._sent, self._done = 0, False
        return Observation(self._question.text)

    def step(self, action: Action) -> Observation:
        if self._world is None or self._done:
            raise EnvironmentEnded("search: step after the end or before reset; call reset first")
        if not isinstance(action, ToolCall):
            return Observation(f"Error: call a tool: {', '.join(self._offered())}.", valid=False)
        try:
            observation = self._carried_out(self._world, action)
        except Refused as refusal:
            return Observation(f"Error: {refusal}", valid=False)
        self._done = observation.done
        return observation

    def _offered(self) -> list[str]:
        """Tools of the dialogue that is going on."""
        if len(self._stack) > 1:
            return ["search", "open", "report"]
        return ["search", "open", "answer"] + (["spawn_subagent"] if self._limits.subagents else [])

    def _carried_out(self, place: World, call: ToolCall) -> Observation:
        if call.name not in (offered := self._offered()):
            who = "a sub-agent" if len(self._stack) > 1 else "here"
            raise Refused(f"no tool {call.name[:40]!r} for {who}; there are {', '.join(offered)}.")
        arguments = _checked(call, next(tool for tool in self._tools if tool.name == call.name))
        match call.name:
            case "search":
                return self._searched(place, arguments["query"])
            case "open":
                return self._opened(place, arguments["doc"])
            case "spawn_subagent":
                return self._spawned(place, arguments["query"])
            case "report":
                return self._reported(arguments["text"])
            case _:
                return self._answered(arguments["value"], arguments.get("cite", []))

    def _searched(self, place: World, query: str) -> Observation:
        docs = place.search(query[:_MOST_QUERY], self._limits.results)
        text = "\n".join(f"{self._snippet(place.by_id[doc].text)} [{doc}]" for doc in docs) or "No results."
        here = self._stack[-1]
        here.seen |= set(docs)
        here.notes.searched(place, query, docs, text)
        return Observation(text, info={"docs": list(docs)})

    def _snippet(self, text: str) -> str:
        words = text.split()
        n = self._limits.snippet_words
        return text if not n or len(words) <= n else " ".join(words[:n]) + " ..."

    def _opened(self, place: World, doc: str) -> Observation:
        if doc not in place.by_id:
            raise Refused(f"no document {doc[:20]!r}.")
        here = self._stack[-1]
        text = f"{place.by_id[doc].text} [{doc}]"
        here.seen.add(doc)
        here.notes.opened(doc, text)
        return Observation(text, info={"docs": [doc]})

    def _spawned(self, place: World, query: str) -> Observation:
        if self._sent >= self._limits.subagents:
            raise Refused(f"all {self._limits.subagents} sub-agents have been sent.")
        asked = place.asked(query)
        if asked is not None:
            self._stack[-1].notes.asked_about(place, asked.entity)
        self._sent += 1
        self._stack.append(Dialogue(Notes(asked)))
        return Observation(self._prompt.format(query=query[:_MOST_QUERY]), session=SessionChange.OPEN)

    def _reported(self, text: str) -> Observation:
        child = self._stack.pop()
        docs = tuple(doc for doc in named_documents(text[:_MOST_QUERY]) if doc in child.seen)
        parent = self._stack[-1]
        parent.seen |= set(docs)
        said = f"Report:\n{text[:_MOST_QUERY]}"
        parent.notes.reported(docs, said)
        return Observation(said, info={"docs": list(docs)}, session=SessionChange.CLOSE)

    def _answered(self, value: str, cite: Sequence[str]) -> Observation:
        assert self._question is not None
        cited = list(dict.fromkeys(cite))
        retrieved = [doc for doc in cited if doc in self._stack[-1].seen]
        if self._limits.refuse_citations and len(retrieved) < len(cited):
            unseen = next(doc for doc in cited if doc not in retrieved)
            raise Refused(f"{unseen[:20]!r} was cited, but not retrieved before.")
        right = _plain(value) == _plain(self._question.answer)
        gold = set(self._question.gold)
        shared = len(gold & set(retrieved))
        score, f1 = float(right), 2 * shared / (len(gold) + len(cited))
        info = {"cited": cited, "citation_f1": f1, "grounded": score * f1, "subagents": self._sent}
        return Observation("Answer received.", reward=score, done=True, success=right, score=score, info=info)

    def copy(self) -> Search:
        twin = copy(self)
        twin._stack = [dialogue.copy() for dialogue in self._stack]
        return twin

    def state_hash(self) -> str:
        """Question, dialogues and the documents that each may cite, sub-agents sent, and whether it was answered."""
        assert self._question is not None
        dialogues = [",".join(sorted(dialogue.seen)) for dialogue in self._stack]
        asked = (self._question.text, ",".join(self._question.gold))
        return stable_hash("search", *asked, str(self._sent), str(self._done), *dialogues)

    def tools(self) -> Sequence[ToolSpec]:
        return self._tools

    def close(self) -> None:
        self._world = None

    # -- demonstrator ----------------------------------------------------------------------------------------------
    def expert_action(self, rng: Random, mistake_rate: float) -> ToolCall:
        assert self._world is not None
        inside = len(self._stack) > 1
        may = not inside and self._sent < self._limits.subagents
        return self._stack[-1].notes.next_call(
            self._world,
            rng,
            mistake_rate,
            delegate=self._delegate if may else 0.0,
            subagent=inside,
            focused=self._focused,
        )

    def expert_summary(self) -> str:
        """The passages that matter so far in this dialogue, with their documents."""
        assert self._world is not None
        return self._stack[-1].notes.summary(self._world)

    def corpus(self, split: str, count: int) -> Iterator[str]:
        return scripted_texts(self, split, count)


def _plain(text: str) -> tuple[str, ...]:
    """Words of an answer, without case, punctuation and articles."""
    return tuple(word for word in terms(text) if word not in _ARTICLES)


def _checked(call: ToolCall, tool: ToolSpec) -> Mapping[str, Any]:
    """The arguments, when they are what the tool takes: strings, and lists of strings."""
    properties = tool.parameters["properties"]
    missing = [name for name in tool.parameters["required"] if name not in call.arguments]
    if missing or set(call.arguments) - set(properties):
        raise Refused(f"{call.name} takes {', '.join(properties)}.")
    for name, value in call.arguments.items():
        if properties[name]["type"] == "string":
            if not isinstance(value, str):
                raise Refused(f"{name} must be a string.")
        elif not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise Refused(f"{name} must be a list of document ids.")
    return call.arguments


def _tools(subagents: bool) -> tuple[ToolSpec, ...]:
    def tool(name: str, description: str, optional: Sequence[str] = (), **properties: str) -> ToolSpec:
        types: dict[str, Any] = {
            key: {"type": "array", "items": {"type": "string"}, "description": text}
            if key == "cite"
            else {"type": "string", "description": text}
            for key, text in properties.items()
        }
        required = [key for key in properties if key not in optional]
        return ToolSpec(name, description, {"type": "object", "properties": types, "required": required})

    found = [
        tool("search", "Lists the passages of the library that fit the query best.", query="words to look for"),
        tool("open", "Shows a whole document.", doc="its id, for example k3"),
        tool(
            "answer",
            "Gives the final answer and ends the task.",
            ("cite",),
            value="the answer alone",
            cite="ids of the documents that say so; only documents that were retrieved",
        ),
    ]
    if subagents:
        found += [
            tool(
                "spawn_subagent",
                "Sends a sub-agent with a dialogue of its own; it sees the query alone, and its report comes back.",
                query="the question it shall answer",
            ),
            tool(
                "report",
                "Ends a sub-agent's dialogue.",
                text="what was found, with the documents that say so in brackets",
            ),
        ]
    return tuple(found)
