from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from loopformers import LoopedForCausalLM
from loopformers.cli.generate import TextStream
from loopformers.cli.main import main
from loopformers.data.tokenizer import bundled_tokenizer
from loopformers.testing import tiny_model
from tests.tokenizer_styles import space_marking_tokenizer

PROMPT = "It was a bright cold day"


def generate(
    capsys: pytest.CaptureFixture[str], folder: Path, *arguments: object, prompt: str = PROMPT, notes: int = 0
) -> dict[str, Any]:
    assert main(["generate", str(folder), "--prompt", prompt, *map(str, arguments), "--json"]) == 0
    output = capsys.readouterr()
    assert output.err.count("\n") == output.err.count("warning: ") == notes
    record: dict[str, Any] = json.loads(output.out)
    return record


def expected(folder: Path, **options: Any) -> list[int]:
    """What the model's own generate gives."""
    model = LoopedForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([bundled_tokenizer()(PROMPT)["input_ids"]])
    torch.manual_seed(options.pop("seed", 0))
    output = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, eos_token_id=0, **options)
    new: list[int] = output[0, ids.shape[1] :].tolist()
    return new


def test_json_holds_one_sample_a_budget_equal_to_the_models_own(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoints / "elastic-flt"
    record = generate(capsys, folder, "--num-loops", "1,3,5", "--max-new-tokens", 6, notes=1)  # 5 steps are untrained
    tokenizer = bundled_tokenizer()
    assert (record["model"], record["prompt"]) == (str(folder), PROMPT)
    assert record["num_prompt_tokens"] == len(tokenizer(PROMPT)["input_ids"])
    assert [sample["num_loops"] for sample in record["samples"]] == [1, 3, 5]
    for sample in record["samples"]:
        ids = expected(folder, num_loops=sample["num_loops"], max_new_tokens=6, do_sample=False)
        assert sample["token_ids"] == ids
        assert sample["num_new_tokens"] == len(ids)
        assert sample["text"] == tokenizer.decode(ids, skip_special_tokens=True)
    flops = [sample["forward_flops_per_token"] for sample in record["samples"]]
    assert flops == sorted(flops)
    assert len({tuple(sample["token_ids"]) for sample in record["samples"]}) == 3


def test_an_untrained_run_gets_one_note_before_its_text(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prompt", PROMPT, "--num-loops", "2", "--max-new-tokens", "3"]
    assert main(["generate", str(checkpoints / "elastic-flt"), *arguments]) == 0
    output = capsys.readouterr()
    assert output.out.startswith(PROMPT)
    assert output.err.startswith("warning: 2 steps of 1/2 were never drawn in training, by the configuration")
    assert output.err.count("never drawn") == 1
    assert "ScheduleWarning" not in output.err


def test_a_schedule_is_run_as_given(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoints / "elastic-flt"
    record = generate(capsys, folder, "--schedule", "2/3,1/3", "--schedule", "1/3,2/3", "--max-new-tokens", 5)
    assert [sample["schedule"] for sample in record["samples"]] == ["2/3,1/3", "1/3,2/3"]
    for sample in record["samples"]:
        assert sample["token_ids"] == expected(folder, schedule=sample["schedule"], max_new_tokens=5, do_sample=False)


def test_sampling_follows_its_options_and_its_seed(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoints / "lt"
    options = ["--temperature", 0.7, "--top-p", 0.9, "--max-new-tokens", 8]
    first, again, other = (generate(capsys, folder, *options, "--seed", seed)["samples"] for seed in (3, 3, 4))
    assert first == again
    assert first != other
    ids = expected(folder, seed=3, do_sample=True, temperature=0.7, top_p=0.9, top_k=0, max_new_tokens=8)
    assert first[0]["token_ids"] == ids


def test_each_budget_of_a_sampled_run_starts_from_the_same_seed(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = generate(capsys, checkpoints / "lt", "--num-loops", "2,2", "--top-k", 40, "--max-new-tokens", 6)
    first, second = record["samples"]
    assert first == second


def test_beams_are_searched(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoints / "lt"
    record = generate(capsys, folder, "--num-beams", 3, "--max-new-tokens", 5)
    assert record["samples"][0]["token_ids"] == expected(folder, num_beams=3, do_sample=False, max_new_tokens=5)
    assert main(["generate", str(folder), "--prompt", PROMPT, "--num-beams", "3", "--max-new-tokens", "5"]) == 0
    assert capsys.readouterr().out == PROMPT + record["samples"][0]["text"] + "\n"


def test_a_terminal_gets_the_prompt_and_its_continuation(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoints / "lt"
    text = generate(capsys, folder, "--max-new-tokens", 6)["samples"][0]["text"]
    assert main(["generate", str(folder), "--prompt", PROMPT, "--max-new-tokens", "6"]) == 0
    assert capsys.readouterr() == (f"{PROMPT}{text}\n", "")


def test_several_budgets_stand_under_headings(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoints / "elastic-flt"
    arguments = ["--schedule", "uniform:1", "--schedule", "2/3,1/3", "--max-new-tokens", "4"]
    one, two = (sample["text"] for sample in generate(capsys, folder, *arguments)["samples"])
    assert main(["generate", str(folder), "--prompt", PROMPT, *arguments]) == 0
    assert capsys.readouterr().out == f"1 loop\n{PROMPT}{one}\n\n2 loops: 2/3,1/3\n{PROMPT}{two}\n"


def test_a_prompt_is_read_from_stdin(
    checkpoints: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    record = generate(capsys, checkpoints / "lt", "--max-new-tokens", 1, prompt="-")
    assert record["prompt"] == PROMPT


def test_a_tokenizer_may_live_elsewhere(checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(checkpoints / "lt", bare, ignore=shutil.ignore_patterns("tokenizer*"))
    assert main(["generate", str(bare), "--prompt", PROMPT]) == 2
    assert "holds no tokenizer; name the folder of one with --tokenizer" in capsys.readouterr().err
    assert generate(capsys, bare, "--tokenizer", checkpoints / "lt", "--max-new-tokens", 2)["samples"][0]["token_ids"]


def test_text_is_the_prompts_own_continuation_where_words_hold_their_spaces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = space_marking_tokenizer()
    tiny_model("lt", vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    capsys.readouterr()  # the bars of saving
    record = generate(capsys, tmp_path, "--max-new-tokens", 7, prompt="It was")
    sample = record["samples"][0]
    whole = tokenizer.decode(tokenizer("It was")["input_ids"] + sample["token_ids"], skip_special_tokens=True)
    assert "It was" + sample["text"] == whole
    assert main(["generate", str(tmp_path), "--prompt", "It was", "--max-new-tokens", "7"]) == 0
    assert capsys.readouterr().out == whole + "\n"


def test_generation_stops_at_any_end_token_of_the_generation_config(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(checkpoints / "lt", tmp_path / "lt"))
    free = generate(capsys, folder, "--max-new-tokens", 6)["samples"][0]["token_ids"]
    last = next(i for i in range(1, 6) if free[i] not in free[:i])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, free[last]]}))
    stopped = generate(capsys, folder, "--max-new-tokens", 6)["samples"][0]["token_ids"]
    assert stopped == free[: last + 1]


def test_generation_stops_at_the_end_of_text(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """peer-faults 23: stop tokens of another tokenizer, and generation never ends."""
    folder = Path(shutil.copytree(checkpoints / "lt", tmp_path / "lt"))
    model = LoopedForCausalLM.from_pretrained(folder)
    ids = expected(folder, max_new_tokens=9, do_sample=False)
    stop = next(token for token in ids if token != ids[0])
    model.config.eos_token_id = model.generation_config.eos_token_id = stop
    model.save_pretrained(folder)
    capsys.readouterr()
    record = generate(capsys, folder, "--max-new-tokens", 9)
    assert record["samples"][0]["token_ids"] == ids[: ids.index(stop) + 1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--max-new-tokens", "0"], "--max-new-tokens: 0 must be a whole number from 1 to 2,147,483,647"),
        (
            ["--temperature", "0"],
            "--temperature: 0 must be a finite number at least 1e-06 and at most 1e+06; leave it out",
        ),
        (["--temperature", "nan"], "--temperature: nan must be a finite number"),
        (["--temperature", "1e-45"], "--temperature: 1e-45 must be a finite number at least 1e-06"),
        (["--top-k", "0"], "--top-k: 0 must be a whole number from 1"),
        (["--top-p", "1.5"], "--top-p: 1.5 must be a finite number above 0 and at most 1"),
        (["--num-beams", "0"], "--num-beams: 0 must be a whole number from 1 to 1,024"),
        (["--num-beams", "1000000"], "--num-beams: 1000000 must be a whole number from 1 to 1,024"),
        (["--seed", "-1"], "--seed: -1 must be a whole number from 0 to 4,294,967,295"),
        (["--seed", "18446744073709551616"], "--seed: 18446744073709551616 must be a whole number"),
        (["--seed", "9" * 5000], "--seed: '" + "9" * 30 + "'.. (5,000 characters) must be a whole number"),
        (["--prompt", "a\udcff"], "contains bytes that are not UTF-8"),
        (["--num-loops", "0"], "num_loops=0 must be a whole number of at least 1"),
        (["--schedule", "2/3,1/3"], "does not know step sizes"),
        (["--prompt", ""], "--prompt '' holds no token"),
    ],
)
def test_bad_input_is_refused_before_anything_is_printed(
    checkpoints: Path, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(checkpoints / "lt"), "--prompt", PROMPT, *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert text in output.err


def test_more_tokens_than_learned_positions_are_refused_with_what_fits(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoints / "loopformer"
    num_prompt = len(bundled_tokenizer()(PROMPT)["input_ids"])
    assert main(["generate", str(folder), "--prompt", PROMPT, "--max-new-tokens", "40"]) == 2
    assert "more than the 40 positions that this model learned" in capsys.readouterr().err
    fits = generate(capsys, folder, "--max-new-tokens", 40 - num_prompt)
    assert fits["samples"][0]["num_new_tokens"] <= 40 - num_prompt
    assert main(["generate", str(folder), "--prompt", PROMPT * 20, "--max-new-tokens", "1"]) == 2
    assert "shorten the prompt" in capsys.readouterr().err


def test_a_tokenizer_of_another_vocabulary_is_refused(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model("lt").save_pretrained(tmp_path / "small")
    arguments = ["--prompt", PROMPT, "--tokenizer", str(checkpoints / "lt")]
    assert main(["generate", str(tmp_path / "small"), *arguments]) == 2
    assert "and the model knows 61; give the model's own with --tokenizer" in capsys.readouterr().err


# -- the stream ---------------------------------------------------------------------------------------------------


def test_a_stream_hands_on_whole_characters_only() -> None:
    tokenizer = bundled_tokenizer()
    ids = tokenizer("naïve – 🐋 whale")["input_ids"]
    pieces: list[str] = []
    stream = TextStream(tokenizer, pieces.append)
    stream.put(torch.tensor([[5, 6, 7]]))  # the prompt
    for token in ids:
        stream.put(torch.tensor([token]))
    stream.end()
    assert "".join(pieces) == "naïve – 🐋 whale"
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert len(pieces) > 3


def test_a_stream_that_ends_inside_a_character_shows_what_there_is() -> None:
    tokenizer = bundled_tokenizer()
    ids = tokenizer("ab🐋")["input_ids"][:-1]
    pieces: list[str] = []
    stream = TextStream(tokenizer, pieces.append)
    stream.put(torch.tensor([[5]]))
    for token in ids:
        stream.put(torch.tensor([token]))
    stream.end()
    assert "".join(pieces) == tokenizer.decode(ids)


def test_a_stream_keeps_the_space_that_begins_a_word() -> None:
    tokenizer = space_marking_tokenizer()
    pieces: list[str] = []
    stream = TextStream(tokenizer, pieces.append)
    stream.put(torch.tensor([tokenizer("It was")["input_ids"]]))
    for token in tokenizer.convert_tokens_to_ids(["▁a", "▁cold", "▁day", "</s>"]):
        stream.put(torch.tensor([token]))
    stream.end()
    assert pieces == [" a", " cold", " day"]


def test_without_a_number_a_text_ends_where_the_positions_do(checkpoints, capsys):
    """transformers' reminder of the model's length would stand in the middle of the text."""
    folder = checkpoints / "lt"
    limit = LoopedForCausalLM.from_pretrained(folder).config.max_position_embeddings
    capsys.readouterr()
    record = generate(capsys, folder)
    room = limit - record["num_prompt_tokens"]
    assert record["samples"][0]["num_new_tokens"] <= min(64, room)
    assert main(["generate", str(folder), "--prompt", PROMPT, "--max-new-tokens", str(room + 1)]) == 0
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"more than the {limit} positions" in error
    assert f"--max-new-tokens {room}" in error
