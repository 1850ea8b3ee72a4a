"""A streamed profile against measures of all states at once."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from loopformers import ConfigError, DataError, NonFiniteError, Schedule
from loopformers.analysis import geometry
from loopformers.analysis.lens import depth_needed
from loopformers.analysis.profile import profile_model
from loopformers.analysis.similarity import linear_cka
from loopformers.testing import tiny_model

IDS = torch.randint(61, (5, 7), generator=torch.Generator().manual_seed(2))
WINDOWS = [{"input_ids": row} for row in IDS]


def profile(model, *schedules, windows=WINDOWS, **options):
    runs = [model.config.resolve_schedule(schedule=s) for s in schedules] or [model.config.resolve_schedule()]
    return profile_model(model, windows, runs, **options)


@pytest.mark.parametrize(
    ("preset", "schedule", "layers"),
    [
        ("flt", "uniform:4", {}),
        ("lt", "uniform:4", {"num_prelude_layers": 1, "num_coda_layers": 1}),
        ("loopformer", "2/6,1/6,1/6,2/6", {}),
        ("base-loop", "uniform:4", {}),
    ],
)
def test_every_measure_is_that_of_all_states_at_once(preset, schedule, layers):
    model = tiny_model(preset, num_loops=6, **layers).double()
    (run,) = profile(model, schedule, batch_size=2).runs
    core = model.model
    prepared = core.prepare(IDS, None, None, None, None, model.config.resolve_schedule(schedule=schedule))
    with torch.no_grad():
        h = model(IDS, schedule=schedule, output_loop_states=True).loop_states
        logits = torch.stack([model.head(core.finish(state, prepared)) for state in h])[:, :, :-1]
    targets = IDS[:, 1:]
    depths = depth_needed(logits.argmax(dim=-1)).double()
    for t, loop in enumerate(run.loops):
        expected = {
            "loop": t + 1,
            "state_norm": h[t].norm(dim=-1).mean(),
            "anisotropy": geometry.anisotropy(h[t]).mean(),
            "curvature": geometry.curvature(h[t]).mean(),
            "prompt_entropy": geometry.prompt_entropy(h[t]).mean(),
            "relative_prompt_entropy": geometry.prompt_entropy(h[t]).mean() / math.log(7),
            "loss": F.cross_entropy(logits[t].flatten(0, 1), targets.flatten()),
            "settled": (depths <= t + 1).double().mean(),
        }
        if t > 0:
            expected["relative_change"] = ((h[t] - h[t - 1]).norm(dim=-1) / h[t].norm(dim=-1)).mean()
        if t > 1:
            expected["update_cosine"] = F.cosine_similarity(h[t] - h[t - 1], h[t - 1] - h[t - 2], dim=-1).mean()
        for name, value in expected.items():
            assert getattr(loop, name) == pytest.approx(float(value), rel=1e-6), name
    assert run.loops[0].relative_change is None
    assert run.loops[1].update_cosine is None
    assert [loop.time for loop in run.loops][-1] == pytest.approx(1.0)
    assert run.mean_depth_needed == pytest.approx(float(depths.mean()))
    for i, j in itertools.product(range(4), repeat=2):
        assert run.cka[i][j] == pytest.approx(float(linear_cka(h[i].flatten(0, 1), h[j].flatten(0, 1))), rel=1e-9)
    assert run.mean_cka == pytest.approx(sum(run.cka[i][j] for i in range(4) for j in range(i)) / 6)


def test_the_last_loops_loss_is_the_models():
    model = tiny_model("loopformer").double()
    (run,) = profile(model, "coarse-first:2").runs
    with torch.no_grad():
        expected = model(IDS, labels=IDS, schedule="coarse-first:2").loss
    assert run.loops[-1].loss == pytest.approx(float(expected), rel=1e-6)


def test_the_batch_size_changes_nothing_and_windows_are_read_once_a_run():
    model = tiny_model("loopformer").double()
    one, other = (profile(model, "uniform:3", "uniform:2", batch_size=size) for size in (1, 5))
    for ours, theirs in zip(one.runs, other.runs, strict=True):
        for a, b in zip(ours.loops, theirs.loops, strict=True):
            known = {k: v for k, v in dataclasses.asdict(a).items() if v is not None}
            assert known == pytest.approx({k: dataclasses.asdict(b)[k] for k in known}, rel=1e-9)
        torch.testing.assert_close(torch.tensor(ours.cka), torch.tensor(theirs.cka))
        torch.testing.assert_close(torch.tensor(ours.mean_path), torch.tensor(theirs.mean_path), atol=1e-9, rtol=1e-6)

    class Counted:
        reads = 0

        def __iter__(self):
            Counted.reads += 1
            return iter(WINDOWS)

    seen = []
    profile(model, "uniform:3", "uniform:2", windows=Counted(), batch_size=2, on_batch=seen.append)
    assert Counted.reads == 2
    assert seen == [2, 2, 1] * 2


def test_windows_of_unequal_length_and_masked_labels_count_as_they_should():
    model = tiny_model("flt").double()
    labels = IDS[0].clone()
    labels[:4] = -100
    windows = [{"input_ids": IDS[0], "labels": labels}, {"input_ids": IDS[1, :4]}]
    result = profile(model, windows=windows)
    assert (result.num_windows, result.num_tokens, result.num_targets) == (2, 11, 3 + 3)
    with torch.no_grad():
        nats = 3 * model(IDS[:1], labels=labels[None]).loss + 3 * model(IDS[1:2, :4], labels=IDS[1:2, :4]).loss
    assert result.runs[0].loops[-1].loss == pytest.approx(float(nats) / 6, rel=1e-6)


def test_inert_loops_stagnate_and_random_ones_move():
    inert = tiny_model("flt", randomize=False)  # output projections start at zero
    (run,) = profile(inert).runs
    assert run.mean_cka == pytest.approx(1.0)
    assert run.loops[-1].relative_change == 0.0
    assert run.mean_depth_needed == 1.0
    assert all(share != share for share in profile(inert).plane_shares)
    (run,) = profile(tiny_model("flt")).runs
    assert run.mean_cka < 0.999
    assert run.loops[1].relative_change > 0.01


def test_paths_are_displacements_in_one_plane_from_the_first_runs_first_loop():
    model = tiny_model("loopformer", num_loops=4).double()
    result = profile(model, "uniform:4", "uniform:2", batch_size=2)
    with torch.no_grad():
        h = [torch.stack(model(IDS, num_loops=m, output_loop_states=True).loop_states) for m in (4, 2)]
    away = [(states - states.mean(dim=0)).flatten(0, 2) for states in h]
    values, vectors = torch.linalg.eigh(sum(a.T @ a / len(a) for a in away) / 2)
    axes = vectors[:, [-1, -2]]
    means = [states.mean(dim=(1, 2)) for states in h]
    axes = axes * torch.where((means[0][-1] - means[0][0]) @ axes < 0, -1.0, 1.0)
    radius = h[0][-1].norm(dim=-1).mean()
    for run, mean, states in zip(result.runs, means, h, strict=True):
        torch.testing.assert_close(
            torch.tensor(run.mean_path).double(), (mean - means[0][0]) @ axes / radius, rtol=1e-6, atol=1e-9
        )
        assert len(run.token_paths) == 5
        for row, path in enumerate(run.token_paths):
            expected = (states[:, row, -1] - h[0][0, row, -1]) @ axes / radius
            torch.testing.assert_close(torch.tensor(path).double(), expected, rtol=1e-6, atol=1e-9)
    assert result.runs[0].mean_path[0] == (0.0, 0.0)
    assert min(result.runs[0].mean_path[-1]) >= 0
    expected = (float(values[-1] / values.sum()), float(values[-2] / values.sum()))
    assert result.plane_shares == pytest.approx(expected)


def test_the_lens_reads_the_window_that_was_asked_for():
    model = tiny_model("loopformer").double()
    for batch_size in (2, 3):
        (run,) = profile(model, batch_size=batch_size, lens_window=3, lens_tokens=4).runs
        assert [token.input_id for token in run.lens] == IDS[3, 2:6].tolist()
        assert [token.target_id for token in run.lens] == IDS[3, 3:7].tolist()
        with torch.no_grad():
            logits = model(IDS[3:4]).logits[0, 2:6]
        assert [token.loops[-1].token_ids[0] for token in run.lens] == logits.argmax(dim=-1).tolist()


def test_a_model_in_training_is_put_back_and_one_loop_is_legal():
    model = tiny_model("flt").train()
    (run,) = profile(model, "uniform:1").runs
    assert model.training
    assert run.mean_cka is None
    assert run.mean_depth_needed == 1.0


def test_what_cannot_be_measured_is_refused():
    model = tiny_model("flt")
    with pytest.raises(ConfigError, match=r"schedules=\[\] asks for nothing"):
        profile_model(model, WINDOWS, [])
    with pytest.raises(ConfigError, match="batch_size=0 must be"):
        profile(model, batch_size=0)
    with pytest.raises(ConfigError, match="does not know step sizes"):
        profile_model(model, WINDOWS, [Schedule.parse("2,1", num_loops=None, grid=3)])
    with pytest.raises(ConfigError, match="GiB of sums"):
        profile(model, max_bytes=1000)
    with pytest.raises(DataError, match="no target to predict"):
        profile(model, windows=[{"input_ids": IDS[0, :1]}])
    with pytest.raises(DataError, match="no target to predict"):
        profile(model, windows=[])
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.fill_(float("inf"))
    with pytest.raises(NonFiniteError, match="the state after loop 1 of schedule 1/3,1/3,1/3 is not finite"):
        profile(model)
