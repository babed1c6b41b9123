"""The search environment: its worlds, citations, sub-agents, script, and what a task may not share with another."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from itertools import combinations
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.environments.name_pairs import split_pairs
from megatron_ext.environments.protocol import (
    Demonstrator,
    Environment,
    Observation,
    SessionChange,
    Summarizer,
    ToolCall,
)
from megatron_ext.environments.search.environment import Search
from megatron_ext.environments.search.names import WORDS, names
from megatron_ext.environments.search.world import DOCUMENT, QUESTIONS, World, WorldShape, document_id, world
from megatron_ext.environments.splits import SPLITS
from megatron_ext.harness.schema import first_problem

EASY: Mapping[str, Any] = {"worlds": 6}
HARD: Mapping[str, Any] = {
    "worlds": 4,
    "hops": [1, 2],
    "wordings": 3,
    "filler": 2,
    "snippet_words": 6,
    "distractors": 0.4,
    "results": 5,
    "delegate": 0.5,
    "mark": "'",
}


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall(name, arguments)


def play(environment: Search, seed: int, rate: float, *, split: str = "train", turns: int = 30) -> list[Observation]:
    rng = Random(seed)
    seen = [environment.reset(seed, split=split)]
    while not seen[-1].done and len(seen) <= turns:
        seen.append(environment.step(environment.expert_action(rng, rate)))
    return seen


def test_word_lists_make_distinct_names() -> None:
    words = [word for first, second in WORDS.values() for word in (*first, *second)]
    assert len(set(words)) == len(words)
    for kind in WORDS:
        parts = {split: set(names(kind, 12, 3, split)) for split in SPLITS}
        assert sum(map(len, parts.values())) == 144
        assert not any(parts[a] & parts[b] for a, b in combinations(SPLITS, 2))
        trained = {word for name in parts["train"] for word in name.split()}
        assert trained == {word for side in WORDS[kind] for word in side[:12]}
    with pytest.raises(ValueError, match="2 first words but 1 second words"):
        split_pairs(["a", "b"], ["c"], 0, 0.5, 0.2, "train")


@pytest.mark.parametrize(
    "shape", [WorldShape(), WorldShape(passages=60, distractors=0.5, wordings=3, filler=2, mark="'")]
)
def test_a_world_states_each_fact_once(shape: WorldShape) -> None:
    made = World(shape, "train", 3)
    assert len(made.passages) == shape.passages == len(made.by_id)
    assert [p.text for p in World(shape, "train", 3).passages] == [p.text for p in made.passages]
    assert [p.text for p in World(shape, "train", 4).passages] != [p.text for p in made.passages]
    stated = [(p.subject, p.relation) for p in made.passages if p.relation not in ("moved", "worked")]
    assert len(stated) == len(set(stated)) == 6 * shape.companies
    assert abs(1 - len(stated) / shape.passages - shape.distractors) < 6 / shape.passages
    people = [p.object for p in made.passages if p.relation in ("founder", "buyer")]
    assert len(set(people)) == len(people), "a person founded or bought one company"
    for relations in QUESTIONS:
        for entity in made.starts[relations]:
            question = made.question(relations, entity)
            texts = [made.by_id[doc].text for doc in question.gold]
            assert (
                question.entity in texts[0] and question.answer in texts[-1] and made.asked(question.text) == question
            )
    assert made.asked("Who founded nothing?") is None and made.asked("") is None


def test_search_ranks_by_bm25_with_stable_ties() -> None:
    made = world(WorldShape(), "dev", 0)
    passage = made.facts[made.starts["founder",][0], "founder"]
    best = made.search(f"{passage.subject} founded", 3)
    assert best[0] == passage.doc and len(best) == 3
    # Passages about one name are equally long and rank equal, in the order of their numbers.
    about = [p.doc for p in made.passages if p.subject == passage.subject or p.object == passage.subject]
    assert list(made.search(passage.subject, len(about))) == about and len(about) > 1
    assert made.search(passage.text, 200)[0] == passage.doc
    for nothing in ("", "!?", "zzz qqq", "é ☃"):
        assert made.search(nothing, 3) == ()


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=80), st.integers(1, 9))
def test_any_query_is_answered(query: str, count: int) -> None:
    found = world(WorldShape(), "train", 0).search(query, count)
    assert len(found) <= count and len(set(found)) == len(found)


@pytest.mark.parametrize("knobs", [EASY, HARD, {**EASY, "hops": [1]}, {**EASY, "subagents": 0}])
def test_script_succeeds_and_its_mistakes_fail(knobs: Mapping[str, Any]) -> None:
    environment = Search(**knobs)
    assert isinstance(environment, Environment) and isinstance(environment, Demonstrator)
    assert isinstance(environment, Summarizer)
    sent = 0
    for split in SPLITS:
        for task in environment.tasks(split, 30):
            seen = play(environment, task.seed, 0.0, split=split)
            last = seen[-1]
            assert last.success and last.info["citation_f1"] == 1.0 and all(one.valid for one in seen)
            assert last.info["cited"] == task.data["gold"]
            sent += last.info["subagents"]
    assert (sent > 0) == (knobs.get("subagents", 4) > 0)
    tasks = environment.tasks("train", 60)
    wins = [sum(play(environment, task.seed, rate)[-1].success for task in tasks) for rate in (0.5, 1.0)]
    assert len(tasks) * 0.9 > wins[0] > wins[1]
    assert wins[1] < len(tasks) * (0.7 if knobs.get("hops") == [1] else 0.5)
    assert all(play(environment, task.seed, 1.0)[-1].done for task in tasks), "a mistaken script comes to an end"


def test_a_focused_script_needs_one_passage_and_forgets_what_is_asked_as_its_mistake() -> None:
    environment = Search(hops=[1, 2], results=1, focused=True, worlds=4)
    tasks = environment.tasks("train", 60)

    def success(rate: float) -> float:
        return sum(play(environment, task.seed, rate)[-1].success for task in tasks) / len(tasks)

    assert success(0.0) == 1.0 and 0.2 < success(1.0) < 0.6
    unfocused = Search(hops=[1, 2], results=1, worlds=4)
    tries = [len(play(unfocused, task.seed, 0.0)) - len(play(environment, task.seed, 0.0)) for task in tasks]
    assert max(tries) > 0, "without the relation it has to search again"


def test_random_player_fails() -> None:
    environment = Search(hops=[1, 2], **EASY)
    wins = 0
    for task in environment.tasks("train", 100):
        rng = Random(task.seed)
        observation = environment.reset(task.seed)
        place = world(WorldShape(), "train", task.seed % 6)
        everything = sorted({p.object for p in place.passages} | place.subjects)
        for _ in range(12):
            if observation.done:
                break
            name, doc = rng.choice(everything), rng.choice(place.passages).doc
            observation = environment.step(
                rng.choice(
                    [
                        call("search", query=name),
                        call("open", doc=doc),
                        call("spawn_subagent", query=name),
                        call("report", text=f"{name} [{doc}]"),
                        call("answer", value=name, cite=[doc] if rng.random() < 0.5 else []),
                    ]
                )
            )
        wins += observation.success
    assert wins <= 5


def test_held_out_tasks_share_no_name_and_no_layout() -> None:
    environment = Search(**EASY)
    held: dict[str, dict[str, set[str]]] = {}
    for split in SPLITS:
        tasks = environment.tasks(split, 80)
        assert len({task.task_id for task in tasks}) == 80
        numbers = {task.seed % 6 for task in tasks}
        assert len(numbers) == 6
        found = {p.subject for n in numbers for p in world(WorldShape(), split, n).passages}
        found |= {p.object for n in numbers for p in world(WorldShape(), split, n).passages}
        texts = [environment.reset(task.seed, split=split).text for task in tasks]
        forms = [re.sub(r"(founded|bought) \w+ \w+", r"\1 X", text) for text in texts]
        layouts = {f"{form} {task.data['gold']}" for form, task in zip(forms, tasks, strict=True)}
        assert len(set(texts)) == 80
        held[split] = {"names": found, "layouts": layouts}
    for one, other in combinations(SPLITS, 2):
        for what in ("names", "layouts"):
            assert not held[one][what] & held[other][what], (one, other, what)
    words = {split: {word for name in held[split]["names"] for word in name.split()} for split in SPLITS}
    every = {word for side in WORDS.values() for words_ in side for word in words_[:24]}
    assert words["dev"] | words["test"] <= every


def wiring(place: World) -> tuple[object, ...]:
    number = {passage.doc: i for i, passage in enumerate(place.passages)}
    chains = [place.question(chain, e) for chain in QUESTIONS for e in place.starts[chain]]
    return tuple(sorted((q.relations, tuple(number[doc] for doc in q.gold)) for q in chains))


def test_worlds_are_wired_differently() -> None:
    wirings = [wiring(world(WorldShape(), split, n)) for split in SPLITS for n in range(4)]
    assert len(set(wirings)) == len(wirings)


def reset_two_hops(environment: Search) -> tuple[World, Mapping[str, Any], str]:
    (task,) = environment.tasks("train", 1)
    return world(WorldShape(), "train", task.seed % 6), task.data, environment.reset(task.seed).text


def test_citations_are_checked() -> None:
    environment = Search(**EASY)
    place, data, _ = reset_two_hops(environment)
    first, second = data["gold"]
    refused = environment.step(call("answer", value=data["answer"], cite=[first]))
    assert not refused.valid and not refused.done and f"'{first}' was cited, but not retrieved" in refused.text
    environment.step(call("open", doc=first))
    listed = environment.step(call("search", query=place.by_id[second].text))
    assert second in listed.info["docs"] and f"[{second}]" in listed.text
    for cite, f1 in (([first, second], 1.0), ([second], 2 / 3), ([], 0.0), ([first, first, second], 1.0)):
        twin = environment.copy()
        last = twin.step(call("answer", value=f"The {data['answer'].lower()}.", cite=cite))
        assert last.success and last.reward == last.score == 1.0 and last.info["citation_f1"] == pytest.approx(f1)
        assert last.info["grounded"] == last.info["citation_f1"]
    wrong = environment.step(call("answer", value="Nowhere", cite=[second]))
    assert wrong.done and not wrong.success and wrong.score == wrong.info["grounded"] == 0.0 < wrong.info["citation_f1"]


def test_citations_need_not_be_refused() -> None:
    environment = Search(refuse_citations=False, **EASY)
    _, data, _ = reset_two_hops(environment)
    first, second = data["gold"]
    environment.step(call("open", doc=second))
    last = environment.step(call("answer", value=data["answer"], cite=[first, second]))
    # Only the one that was retrieved counts, among the two that were cited.
    assert last.success and last.info["citation_f1"] == 0.5


def test_a_sub_agent_has_its_own_dialogue() -> None:
    environment = Search(subagents=2, subagent_prompt="Find {query}", **EASY)
    place, data, question = reset_two_hops(environment)
    first, second = data["gold"]
    states = [environment.state_hash()]

    def step(action: ToolCall, session: SessionChange = SessionChange.STAY, valid: bool = True) -> str:
        observation = environment.step(action)
        assert (observation.session, observation.valid, observation.done) == (session, valid, False), observation.text
        states.append(environment.state_hash())
        return observation.text

    assert "no tool 'report' for" in step(call("report", text="early"), valid=False)
    assert states[0] == states[-1]
    step(call("open", doc=first))
    assert step(call("spawn_subagent", query="the rest"), SessionChange.OPEN) == "Find the rest"
    assert "no tool 'answer' for a sub-agent" in step(call("answer", value=data["answer"]), valid=False)
    assert "no tool 'spawn_subagent'" in step(call("spawn_subagent", query="more"), valid=False)
    assert states[-1] == states[-2] == states[-3] != states[-4]
    step(call("open", doc=second))
    # A report passes on what its sub-agent saw and names, nothing else.
    said = step(call("report", text=f"{data['answer']} [{second}], see {first} and z9"), SessionChange.CLOSE)
    assert said == f"Report:\n{data['answer']} [{second}], see {first} and z9"
    other = next(p.doc for p in place.passages if p.doc not in (first, second))
    step(call("spawn_subagent", query="again"), SessionChange.OPEN)
    step(call("open", doc=other))
    step(call("report", text="nothing"), SessionChange.CLOSE)
    assert "all 2 sub-agents have been sent" in step(call("spawn_subagent", query="third"), valid=False)
    assert "not retrieved" in step(call("answer", value=data["answer"], cite=[other]), valid=False)
    assert environment.step(call("answer", value=data["answer"], cite=[first, second])).success


@pytest.mark.parametrize(
    ("action", "says"),
    [
        ("search for it", "call a tool: search, open, answer, spawn_subagent"),
        (call("find", query="x"), "no tool 'find'"),
        (call("search"), "search takes query"),
        (call("search", query="x", page=2), "search takes query"),
        (call("search", query=["x"]), "query must be a string"),
        (call("open", doc="zz9"), "no document 'zz9'"),
        (call("answer", cite=[]), "answer takes value, cite"),
        (call("answer", value="x", cite="d1"), "cite must be a list"),
        (call("answer", value="x", cite=[1]), "cite must be a list"),
    ],
)
def test_bad_calls_are_observations(action: ToolCall | str, says: str) -> None:
    environment = Search(**EASY)
    environment.reset(environment.tasks("train", 1)[0].seed)
    before = environment.state_hash()
    observation = environment.step(action)
    assert says in observation.text and not observation.valid and not observation.done
    assert environment.state_hash() == before


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_script_is_rebuilt_by_replay_and_its_calls_fit_the_schemas(rate: float) -> None:
    environment, again = Search(**HARD), Search(**HARD)
    schemas = {tool.name: tool.parameters for tool in environment.tools()}
    for task in environment.tasks("train", 12):
        observation = environment.reset(task.seed)
        rng = Random(task.seed)
        actions: list[ToolCall] = []
        while not observation.done:
            again.reset(task.seed)
            for action in actions:
                again.step(action)
            # A copy also keeps the mistake that was chosen; a replay cannot know it.
            others = [environment.copy(), again] if rate == 0 else [environment.copy()]
            summary, state = environment.expert_summary(), rng.getstate()
            assert summary
            action = environment.expert_action(rng, rate)
            for other in others:
                copied = Random()
                copied.setstate(state)
                assert (other.expert_summary(), other.expert_action(copied, rate)) == (summary, action)
            assert first_problem(action.arguments, schemas[action.name], action.name) == ""
            actions.append(action)
            observation = environment.step(action)


def test_summary_holds_what_is_needed_to_go_on() -> None:
    environment = Search(delegate=0.0, distractors=0.0, **EASY)
    for task in environment.tasks("train", 20):
        environment.reset(task.seed)
        rng, place = Random(0), world(WorldShape(distractors=0.0), "train", task.seed % 6)
        assert environment.expert_summary() == "Nothing found."
        environment.step(environment.expert_action(rng, 0.0))
        environment.step(environment.expert_action(rng, 0.0))
        summary = environment.expert_summary()
        assert summary.split("\n") == [f"{place.by_id[doc].text} [{doc}]" for doc in task.data["gold"]]


def test_a_mistake_goes_into_the_summary() -> None:
    environment = Search(delegate=0.0, hops=[1], **EASY)
    wrong = 0
    for task in environment.tasks("train", 20):
        environment.reset(task.seed)
        environment.step(environment.expert_action(Random(0), 1.0))
        summary = environment.expert_summary()
        answer = environment.expert_action(Random(0), 1.0)
        assert summary.endswith(f"[{answer.arguments['cite'][0]}]") and answer.arguments["value"] in summary
        wrong += answer.arguments["value"] != task.data["answer"]
    assert 5 < wrong < 20


def test_document_ids() -> None:
    ids = [document_id(number) for number in range(1000)]
    assert ids[:2] == ["b0", "b1"] and ids[199:202] == ["z9", "cb0", "cb1"]
    assert len(set(ids)) == 1000 and all(DOCUMENT.fullmatch(one) for one in ids)
    assert DOCUMENT.findall("see [b0], cb1 and a0 b x10 a10, 7z") == ["b0", "cb1"]


def test_knobs() -> None:
    texts = {}
    cases: dict[str, dict[str, Any]] = {
        "all": {},
        "cut": {"snippet_words": 4},
        "more": {"results": 6},
        "long": {"filler": 3},
    }
    for name, knobs in cases.items():
        environment = Search(delegate=0.0, **EASY, **knobs)
        environment.reset(environment.tasks("train", 1)[0].seed)
        texts[name] = environment.step(environment.expert_action(Random(0), 0.0)).text
    assert texts["cut"].count("...") == 3 and texts["more"].count("\n") == 5
    assert len(texts["long"]) > 2 * len(texts["all"]) > len(texts["cut"])
    assert all(len(task.data["gold"]) == 1 for task in Search(hops=[1], **EASY).tasks("train", 10))
    assert {len(task.data["gold"]) for task in Search(hops=[1, 2], **EASY).tasks("train", 20)} == {1, 2}
    assert {tool.name for tool in Search(subagents=0).tools()} == {"search", "open", "answer"}
    assert len(Search(passages=60, **EASY).corpus("train", 1).__next__()) > 0


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"hops": []}, "search.hops"),
        ({"hops": [3]}, "search.hops"),
        ({"results": 0}, "results >= 1"),
        ({"delegate": 1.0}, "search.delegate"),
        ({"subagent_prompt": "go"}, "search.subagent_prompt"),
        ({"distractors": 0.9}, "search.distractors"),
        ({"passages": 5}, "is no world"),
        ({"wordings": 4}, "search.wordings"),
        ({"words": 99}, "search.words must be 4"),
        ({"words": 12}, "search.words=12 gives 22 names"),
        ({"filler": -1}, "search.filler"),
    ],
)
def test_bad_knobs_are_one_clear_line(knobs: Mapping[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Search(**knobs)


def test_a_world_is_made_once() -> None:
    first, second = Search(**EASY), Search(**EASY)
    tasks = first.tasks("train", 50)
    for task in tasks:
        play(first, task.seed, 0.0)
    begun = time.process_time()  # a busy machine does not lengthen it
    for task in tasks:
        second.reset(task.seed)
        second.step(call("search", query="x"))
    assert (time.process_time() - begun) / len(tasks) < 0.02
    assert second._world is world(WorldShape(), "train", tasks[-1].seed % 6)
