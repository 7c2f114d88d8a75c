"""Each sample runs as it stands, at toy size and with no GPU; and the layer they share is what it claims to be."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cudnn_frost_sm120 import demo, reference
from cudnn_frost_sm120.facts import MaskFacts
from tests.samples import TOY

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "samples"


def run(name: str, *arguments: str) -> str:
    """What a sample prints at toy size."""
    path = SAMPLES / name
    arguments = (*TOY.get(name, ()), *arguments)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(path), *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def layer(**sizes):
    spec = importlib.util.spec_from_file_location("tiny_layer", SAMPLES / "tiny_layer.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module.attention_layer(**sizes)


@pytest.mark.compile
def test_graph_api():
    out = run("01_graph_api.py")
    assert "[0] frost_sm120_sdpa_bwd[" in out
    assert re.search(r"sdpa_bwd_sm120 +declines  requires", out), "the report says why the other engines are not there"
    assert re.search(r"main +\d+ +[\d,]+ +0\n", out), "registers, shared memory and no stack of the main kernel"
    last = out.strip().splitlines()[-1]
    assert re.match(r"checked: dq \d.*, dk \d.*, dv \d.* relative to torch autograd, all within 6e-03", last)
    assert "not run" in last, "it does not claim what was not done"


def test_wrapper():
    out = run("02_wrapper.py")
    assert "needs an SM12x GPU" in out
    assert out.count("off torch autograd by") == 3


def test_train_tiny_lm(tmp_path):
    files = ("--json", str(tmp_path / "losses.json"), "--plot", str(tmp_path / "curves.png"))
    out = run("03_train_tiny_lm.py", *files, "--steps", "20")
    record = json.loads((tmp_path / "losses.json").read_text())
    for seed in ("0", "1"):
        theirs, ours = (record["curves"][name][seed] for name in ("torch", "ours"))
        assert len(ours) == 20
        assert ours == pytest.approx(theirs, abs=2e-3), "on the CPU the two differ by rounding"
        assert max(ours[-5:]) < min(ours[:5]), "it learns"
    assert record["curves"]["ours"]["0"] != record["curves"]["ours"]["1"]
    assert "\nwithin the 0." in out
    if importlib.util.find_spec("matplotlib"):
        first = (tmp_path / "curves.png").read_bytes()
        assert first.startswith(b"\x89PNG")
        (tmp_path / "curves.png").unlink()
        run("03_train_tiny_lm.py", *files, "--replot", str(tmp_path / "losses.json"))
        assert (tmp_path / "curves.png").read_bytes() == first


def test_masks_and_sinks():
    out = run("04_masks_and_sinks.py")
    assert out.count(" dq ") == 6
    assert re.search(r"sinks .*dsink \d", out)
    assert re.search(r"bias .*dbias \d", out)
    assert out.endswith("all within 1.2e-02\n")
    assert "NOT" not in out


def test_every_sample_is_run():
    tests = Path(__file__).read_text()
    assert [sample.name for sample in SAMPLES.glob("[0-9]*.py") if f'run("{sample.name}"' not in tests] == []


def test_tune():
    out = run("05_tune.py", "--seqlen", "256")
    assert "[1] frost_sm120_sdpa_bwd[" in out, "there is more than one plan to choose from"
    assert "nothing is timed without an SM12x GPU" in out
    assert "replayed from (engine_id=20690, knobs): frost_sm120_sdpa_bwd[PACK_GQA=" in out


@pytest.mark.compile
def test_ahead_of_time():
    out = run("06_ahead_of_time.py")
    assert re.search(r"1 of 1 kernels for sm_120 in ", out)
    assert re.search(r"  [0-9a-f]{24}: [\d,]+ bytes\n", out)
    assert "no sm_120 GPU here: the kernels wait for one" in out


def test_the_demo_command_finds_the_sample():
    assert demo.sample_path() == SAMPLES / demo.SAMPLE


def test_layer_is_genuine():
    made = layer(batch=2, seqlen=96, heads=2, headdim=32)
    assert made.q.shape == (2, 2, 96, 32)
    assert made.q.transpose(1, 2).is_contiguous()
    mask = MaskFacts(right_bound=0)
    o, lse = reference.sdpa_forward(made.q, made.k, made.v, scale=made.scale, mask=mask)
    torch.testing.assert_close(lse.float(), made.lse)
    assert reference.relative_error(made.o, o) < 3e-3
    exact = reference.sdpa_backward(made.q, made.k, made.v, o, made.do, lse, scale=made.scale, mask=mask)
    assert max(exact.errors(made.autograd).values()) < 1e-5
    assert not torch.equal(made.q[0], made.q[1]), "the pieces are different text"
    with pytest.raises(ValueError, match="the text has"):
        layer(seqlen=100_000)
