"""TextArena's games: a model plays alone, or one side against an opponent that is not trained."""

from __future__ import annotations

import random
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from tuner.config import RunConfig
from tuner.environments.conversation import Dialogue
from tuner.errors import ConfigError, FunctionError, importing
from tuner.runs.environment import Environment, near, seed_rows
from tuner.tasks.functions import WorkflowOutput, called, in_thread
from tuner.tasks.loading import function_of

# What TextArena's own agents send.
_SYSTEM_PROMPT = (
    "You are a competitive game player. Make sure you read the game instructions carefully, and "
    "always follow the required format."
)
_ALIKE = {"temperature": 1.0, "top_p": 1.0, "top_k": -1} | dict.fromkeys(
    ("max_model_len", "max_response_tokens", "enable_thinking"), "null"
)
# The opponent if nothing else names one: the model as the run starts, sampled as it is.
_START = {
    "name": "opponent",
    "model_path": "${model.model_path}",
    "chat_template": "${oc.select:model.custom_chat_template,null}",
    **{key: f"${{oc.select:model.{key},{default}}}" for key, default in _ALIKE.items()},
}
# Games draw from the global generators of Python and NumPy, so only one is in a call at a time.
_DRAWING = threading.Lock()

Opponent = Callable[[str], str | Awaitable[str]]


class TextArena(Environment):
    """A game of TextArena for one or two players.

    A task is a game: its `seed`, and with two players the `player`, 0 or 1, that is trained. The
    reward is the game's. An observation is the user's message and the answer a move. A call has all
    that the player has seen in one message, as from TextArena's own agents; with ids that end in
    `-raw`, which show only what is new, a game is one conversation. Metrics: `turns`,
    `invalid_moves`, and `forfeit` if they ended the game; for the other player `opponent_...`.
    Exceptions of the game are workflow errors.

    Args:
        id: A registered id such as "TicTacToe-v0".
        opponent: The other player: an auxiliary model's name, or a function from an observation to
            a move, or its name. If the file has no auxiliary models, "opponent" is the model as it
            was at the start of the run.
        player: The side that is trained. None: both, in turn.
        system_prompt: Sent before the first observation; None: none.
        train_tasks, eval_tasks: Number of seeds for training and evaluation, from 0 and from
            1,000,000 on; 0: none.
        make_args: Passed to `textarena.make`.

    Raises:
        ConfigError: The game cannot be made, or has more players.
        MissingDependencyError: TextArena is not installed.
    """

    def __init__(
        self,
        id: str,
        *,
        opponent: Opponent | str = "opponent",
        player: int | None = None,
        system_prompt: str | None = _SYSTEM_PROMPT,
        train_tasks: int = 1024,
        eval_tasks: int = 64,
        make_args: Mapping[str, Any] | None = None,
    ) -> None:
        with importing("games of TextArena need the package textarena", "textarena"):
            from textarena.envs.registration import ENV_REGISTRY
        if id not in ENV_REGISTRY:
            raise ConfigError(f"TextArena has no game {id!r}{near(id, ENV_REGISTRY)}")
        if player not in (None, 0, 1):
            raise ConfigError(f"player is {player!r}: use 0 or 1, or leave it out for both in turn")
        named = isinstance(opponent, str) and ":" not in opponent
        self._opponent = opponent if named else function_of(opponent, setting="opponent")
        self._id, self._system_prompt = id, system_prompt
        # With the specification for another process, where the game may not be registered.
        self._game = partial(Game, id, ENV_REGISTRY[id], dict(make_args or {}))
        self._players = self._number_of_players()
        self.train_dataset, self.eval_dataset = seed_rows(train_tasks, eval_tasks)
        if self._players == 2:
            for rows in (self.train_dataset, self.eval_dataset):
                for number, row in enumerate(rows or ()):
                    row["player"] = number % 2 if player is None else player
            if self._opponent == _START["name"]:
                self.settings = {"explorer.auxiliary_models": [_START]}

    def _number_of_players(self) -> int:
        """1 or 2; raises ConfigError if it is neither, or the game cannot be made."""
        from textarena import SinglePlayerState

        failed: Exception | None = None
        for players in (1, 2):
            try:
                made = self._game(players, seed=0).env
            except Exception as error:  # also how games refuse a number of players
                failed = error
                continue
            if players == 2 or isinstance(made.state, SinglePlayerState):
                return players
        said = f"{type(failed).__name__}: {' '.join(str(failed).split())[:300]}"
        if isinstance(failed, AssertionError) or "player" in str(failed).lower():
            said = "it is for more than two players"
        raise ConfigError(f"TextArena's game {self._id} cannot be played: {said}") from failed

    def check_settings(self, config: RunConfig) -> None:
        """Raises ConfigError if there is no auxiliary model of the opponent's name."""
        if self._players == 1 or not isinstance(self._opponent, str):
            return
        local = [one.name for one in config.explorer.auxiliary_models]
        if self._opponent not in (known := [*local, *config.tuner.auxiliary_models]):
            raise ConfigError(
                f"the opponent in {self._id} is {self._opponent!r}, but the auxiliary models are "
                f"{', '.join(known) or 'none'}: add it to explorer.auxiliary_models, with the "
                "model_path of the start or of a checkpoint, or name another opponent"
            )

    async def workflow(
        self, task: dict[str, Any], model: Any, auxiliary_models: Any = None
    ) -> WorkflowOutput:
        """Play one game."""
        side = task.get("player", 0)
        if side not in range(self._players):
            raise FunctionError(f"the task has player {side!r}: use 0 or 1")
        game: Game = await in_thread(partial(self._game, self._players, task.get("seed")))
        seats: list[Dialogue | None] = [None] * self._players
        said = ""
        while not game.done:
            player, trained = game.player, game.player == side
            if trained or isinstance(self._opponent, str):
                by = model if trained else (auxiliary_models or {})[self._opponent]
                seat = None if game.whole else seats[player]
                seats[player] = seat = seat or Dialogue(by, self._system_prompt)
                seat.tell([{"role": "user", "content": game.observation}])
                move = (await seat.answer()).content or ""
                said = move if trained else said
            else:
                move = await called(self._opponent, game.observation)
            await in_thread(partial(game.step, move))
        return WorkflowOutput(reward=game.reward(side), response=said, metrics=game.metrics(side))


class Game:
    """A game that has begun, with its own random numbers.

    `observation` is what `player` sees before its move: all so far (`whole`), or only what is new.
    """

    done = False

    def __init__(
        self, id: str, spec: Any, make_args: Mapping[str, Any], players: int, seed: int | None
    ) -> None:
        import numpy as np
        import textarena

        textarena.envs.registration.ENV_REGISTRY.setdefault(id, spec)
        self._drawn = (random.Random(seed).getstate(), np.random.RandomState(seed).get_state())
        self._invalid = [0] * players
        with self._drawing():
            self.env = textarena.make(id, **make_args)
            self.env.reset(num_players=players, seed=seed)
            self._observe()

    def step(self, move: str) -> None:
        """Make a move; its effect is in the attributes."""
        turn, player = self.env.state.turn, self.player
        with self._drawing():
            self.done, _ = self.env.step(action=move)
            if not self.done:
                self._observe()
        # An invalid move does not count as a turn, unless the game ends with it.
        self._invalid[player] += self.env.state.turn == turn or (
            self.done and self._forfeit(player)
        )

    def _observe(self) -> None:
        self.player, seen = self.env.get_observation()
        self.whole = isinstance(seen, str)
        if not self.whole:
            names = self.env.state.role_mapping
            others = [(who, text) for who, text, _ in seen if who != self.player]
            lines = [f"[{names.get(who, f'Player {who}')}] {text}" for who, text in others]
            seen = "\n".join(lines)
        self.observation = seen

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Give the global generators this game's states, and leave them as they were."""
        import numpy as np

        with _DRAWING:
            before = random.getstate(), np.random.get_state()
            random.setstate(self._drawn[0])
            np.random.set_state(self._drawn[1])
            try:
                yield
            finally:
                self._drawn = random.getstate(), np.random.get_state()
                random.setstate(before[0])
                np.random.set_state(before[1])

    def _forfeit(self, player: int) -> bool:
        return bool(self.env.state.game_info[player].get("invalid_move"))

    def reward(self, player: int) -> float:
        """The game's reward; raises RuntimeError if it has none."""
        rewards, _ = self.env.close()
        found = (rewards or {}).get(player)
        if not isinstance(found, int | float):
            raise RuntimeError(f"the game ended with {found!r} for a reward")
        return float(found)

    def metrics(self, side: int) -> dict[str, float]:
        """See `TextArena`."""
        found = {"turns": float(self.env.state.turn)}
        for player, count in enumerate(self._invalid):
            whose = "" if player == side else "opponent_"
            found[f"{whose}invalid_moves"] = float(count)
            found[f"{whose}forfeit"] = float(self._forfeit(player))
        return found
