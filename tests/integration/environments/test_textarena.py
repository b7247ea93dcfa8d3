"""TextArena itself: its games, played by a model alone or against another."""

from __future__ import annotations

import random
import sys
import threading

import numpy as np
import pytest
import textarena
from textarena.envs.registration import ENV_REGISTRY

from tests.environments.training import trained
from tuner import TunerModelConfig, WorkflowOutput
from tuner.environments import TextArena
from tuner.environments.textarena_games import Game
from tuner.errors import ConfigError, MissingDependencyError
from tuner.runs.environment import from_settings
from tuner.tasks.functions import call_workflow
from tuner.tune import prepare

PIG = {"winning_score": 6, "max_turns": 30}
SLOW = ("Poker", "RushHour", "Sokoban", "SpellingBee", "UltimateTexas")
# One id of each game.
GAMES = sorted({str(spec.entry_point): id for id, spec in reversed(ENV_REGISTRY.items())}.values())


class Words(textarena.Env):
    """Each says two words, and a coin decides; short enough for a random model's context."""

    def reset(self, num_players, seed=None):
        self.state = textarena.TwoPlayerState(num_players=num_players, seed=seed)
        self.state.reset(
            game_state={}, player_prompt_function=lambda player_id, **_: f"P{player_id}."
        )

    def step(self, action):
        state, kind = self.state, textarena.ObservationType.PLAYER_ACTION
        state.add_observation(action, kind, from_id=state.current_player_id)
        if state.turn == 3:
            state.set_winner(random.randrange(2), reason="a coin")
        return state.step()


def words(**given):
    if "Words-v0" not in ENV_REGISTRY:
        textarena.register("Words-v0", Words)
    return TextArena("Words-v0", train_tasks=4, eval_tasks=0, system_prompt=None, **given)


def game(seed, id="PigDice-v0-raw", make_args=PIG, players=2):
    return Game(id, ENV_REGISTRY[id], make_args, players, seed)


def moves(seed):
    """A player who rolls and holds, and at times says something else."""
    draw = random.Random(seed)
    return lambda _=None: draw.choice(["[roll]", "[roll]", "[hold]", "hm"])


def played(one, next_move):
    seen = [one.observation]
    while not one.done:
        one.step(next_move())
        seen.append(one.observation)
    return seen, one.reward(0), one.reward(1), one.metrics(0)


class Said:
    """A chat model that says what a function does, and remembers what it was asked."""

    model_name = "m"

    def __init__(self, says):
        self.says, self.asked = says, []
        self.client = self.chat = self.completions = self

    async def create(self, model, messages):
        self.asked.append(list(messages))
        text = self.says(messages[-1]["content"])
        return textarena_answer(text)


def textarena_answer(text):
    from openai.types.chat import ChatCompletion

    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    return ChatCompletion.model_validate(
        {"id": "1", "created": 0, "model": "m", "object": "chat.completion", "choices": [choice]}
    )


async def run(environment, task, model, **auxiliary):
    return await call_workflow(
        environment.workflow, task=task, model=model, auxiliary_models=auxiliary, logger=None
    )


@pytest.mark.parametrize("id", [id for id in GAMES if not id.startswith(SLOW)])
def test_every_game_is_played_or_refused(id, monkeypatch):
    import nltk

    monkeypatch.setattr(nltk, "download", lambda *_, **__: False)
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    refused = ""
    try:
        environment = TextArena(id, train_tasks=2, eval_tasks=0)
    except ConfigError as error:
        refused = str(error)
    if refused:
        assert f"TextArena's game {id} cannot be played: " in refused
        return
    players = environment._players
    assert all(("player" in row) == (players == 2) for row in environment.train_dataset)
    one = environment._game(players, 5)
    for _ in range(60):
        if not one.done:
            one.step("[nonsense]")
    assert one.observation
    if one.done:
        assert {"turns", "invalid_moves", "forfeit"} <= one.metrics(0).keys()


@pytest.mark.parametrize("seed", range(6))
def test_games_that_run_together_go_as_they_go_alone(seed):
    alone = [played(game(seed + n), moves(n)) for n in range(4)]
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    found = {}

    def play(n):
        found[n] = played(game(seed + n), moves(n))

    threads = [threading.Thread(target=play, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[n] for n in range(4)] == alone
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("side", [0, 1])
async def test_each_side_sees_its_own_game(side, raw):
    environment = TextArena(
        f"PigDice-v0{'-raw' * raw}", make_args=PIG, system_prompt="Play.", train_tasks=4
    )
    assert [row["player"] for row in environment.train_dataset] == [0, 1, 0, 1]
    model, other = Said(moves(1)), Said(moves(2))
    output = await run(environment, {"seed": 3, "player": side}, model, opponent=other)
    assert isinstance(output, WorkflowOutput)
    assert output.reward in (-1, 0, 1)
    for one, player in ((model, side), (other, 1 - side)):
        if not one.asked:  # the other lost before its turn
            continue
        assert f"You are Player {player}" in one.asked[0][1]["content"]
        assert all(messages[0] == {"role": "system", "content": "Play."} for messages in one.asked)
        for number, messages in enumerate(one.asked):
            assert len(messages) == (2 + 2 * number if raw else 2)
    if raw and len(model.asked) > 1:  # what the model itself said is not told to it again
        assert f"[Player {side}] [" not in model.asked[-1][-1]["content"]


async def test_moves_that_are_invalid_are_counted_and_the_reward_is_the_games():
    nim = {"make_args": {"piles": [1, 1]}, "train_tasks": 2, "eval_tasks": 0}
    for first, second, reward, own, others in (
        (["no", "0 1"], ["1 1"], -1, (1, 0), (0, 0)),
        (["no", "no"], [], -1, (2, 1), (0, 0)),
        (["0 1"], ["no", "9 9"], 1, (0, 0), (2, 1)),
        (["0 1", "x"], ["no", "1 1"], -1, (0, 0), (1, 0)),
    ):
        texts = {0: iter(first), 1: iter(second)}
        environment = TextArena("Nim-v0", opponent=lambda _, t=texts: next(t[1]), **nim)
        model = Said(lambda _, t=texts: next(t[0]))
        found = await run(environment, {"seed": 0, "player": 0}, model)
        assert found.reward == reward
        metrics = found.metrics
        assert (metrics["invalid_moves"], metrics["forfeit"]) == own
        assert (metrics["opponent_invalid_moves"], metrics["opponent_forfeit"]) == others


async def test_an_opponent_is_a_function_or_an_auxiliary_model(tmp_path):
    (tmp_path / "other.py").write_text("async def play(observation):\n    return 'no'\n")
    given = {"train_tasks": 1, "eval_tasks": 0}
    for opponent in (f"{tmp_path / 'other.py'}:play", lambda _: "no", "strong"):
        environment = TextArena("TicTacToe-v0", opponent=opponent, **given)
        strong = {"strong": Said(lambda _: "no")}
        found = await run(environment, {"seed": 0, "player": 1}, Said(lambda _: "4"), **strong)
        assert (found.reward, found.metrics["opponent_forfeit"]) == (1, 1)


async def test_a_game_that_breaks_is_an_error():
    """ThreeCardMonte takes the reason of an invalid move for its reward."""
    environment = TextArena("ThreeCardMonte-v0", train_tasks=1, eval_tasks=0)
    with pytest.raises(RuntimeError, match=r"ended with 'Bad action.*for a reward"):
        await run(environment, {"seed": 0}, Said(lambda _: "no"))


def test_a_run_trains_only_the_model(random_model_path, tmp_path):
    traces = trained(words(), random_model_path, tmp_path, "buffer.batch_size=4")
    assert [trace.task["player"] for trace in traces] == [0, 0, 1, 1, 0, 0, 1, 1]
    for trace in traces:
        assert trace.outcome == "completed", trace.error
        player = trace.task["player"]
        assert len(trace.calls) == 2
        assert all(f"P{player}." in call.messages[0]["content"] for call in trace.calls)
        assert trace.reward in (-1, 1)
        heard = trace.calls[-1].messages[-1]["content"]
        assert f"[Player {1 - player}] " in heard
        assert f"[Player {player}] " not in heard


def test_the_opponent_is_the_start_and_sampled_as_the_model_is(random_model_path):
    overrides = [
        f"model.model_path={random_model_path}",
        "model.temperature=0.7",
        "model.max_response_tokens=9",
    ]
    run = prepare(environment="textarena:TicTacToe-v0", overrides=overrides)
    (opponent,) = run.config.explorer.auxiliary_models
    assert (opponent.name, opponent.model_path) == ("opponent", str(random_model_path))
    assert (opponent.temperature, opponent.max_response_tokens) == (0.7, 9)
    assert not prepare(
        environment="textarena:2048-v0", overrides=overrides
    ).config.explorer.auxiliary_models
    environment = TextArena("Nim-v0", opponent="strong")
    other = {"other": TunerModelConfig(model_path=str(random_model_path), max_model_len=99)}
    with pytest.raises(ConfigError, match=r"opponent in Nim-v0 is 'strong', but .* are other: add"):
        prepare(environment=environment, overrides=overrides, auxiliary_models=other)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"id": "TicTacTo-v0"}, "no game 'TicTacTo-v0'; there is TicTacToe-v0"),
        ({"id": "xyzzy"}, r"no game 'xyzzy'; there is 2048-v0, .{,400}, \.\.\.$"),
        ({"id": "SecretMafia-v0"}, "more than two players"),
        ({"id": "Nim-v0", "make_args": {"pile": [1]}}, "TypeError: .*'pile'"),
        ({"id": "Nim-v0", "player": 2}, "player is 2"),
        ({"id": "Nim-v0", "opponent": "nowhere.py:play"}, "there is no file"),
        ({"id": "Nim-v0", "turns": 2}, "unexpected keyword argument 'turns'"),
    ],
)
def test_what_cannot_be_played_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        from_settings({"kind": "textarena", **given}, "tuner.environment")


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    for module in [name for name in sys.modules if name.partition(".")[0] == "textarena"]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=r"\[textarena\]"):
        TextArena("Nim-v0")


def test_a_game_that_is_registered_here_is_known_elsewhere(monkeypatch):
    monkeypatch.setattr(textarena.envs.registration, "ENV_REGISTRY", dict(ENV_REGISTRY))
    textarena.register("Own-v0", ENV_REGISTRY["Nim-v0-raw"].entry_point, piles=[1])
    environment = TextArena("Own-v0", train_tasks=1, eval_tasks=0)
    del textarena.envs.registration.ENV_REGISTRY["Own-v0"]
    assert environment._game(2, 0).observation.startswith("[GAME]")
