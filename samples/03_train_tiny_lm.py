"""A small character model learns real text twice: with torch's attention, and with ours. One line differs.

    python samples/03_train_tiny_lm.py                    # seconds, on the CPU too
    python samples/03_train_tiny_lm.py --size minute      # about a minute on a GPU
    python samples/03_train_tiny_lm.py --replot training.json --plot training.png

Both trainings of a seed start from the same weights and see the same batches. Their loss curves go into one plot, all
numbers into a JSON file, which --replot draws again. With an SM12x GPU our kernels run, under autocast to bf16;
without one, both run on the CPU in fp32, and our gradients come from the fp64 reference.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import cudnn_frost_sm120
import cudnn_frost_sm120.torch as ours
from cudnn_frost_sm120 import target

ALICE = Path(__file__).with_name("alice.txt")
SIZES = {
    "toy": {"layers": 1, "width": 32, "heads": 2, "seqlen": 48, "batch": 4, "steps": 12},
    "minute": {"layers": 6, "width": 384, "heads": 6, "seqlen": 512, "batch": 32, "steps": 400},
}
COLOURS = {"torch": "tab:orange", "ours": "tab:blue"}
SMOOTHED_OVER = 20  # steps; the final loss is the mean of as many, or of a quarter of a shorter training

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def our_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return ours.scaled_dot_product_attention(q, k, v, is_causal=True, strict=True)


ATTENTIONS: dict[str, Attention] = {"torch": torch_attention, "ours": our_attention}


class Block(torch.nn.Module):
    def __init__(self, width: int, heads: int, attention: Attention) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention
        self.before, self.between = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1)
        )
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


class LanguageModel(torch.nn.Module):
    """Next-byte logits (B, S, symbols) from bytes (B, S)."""

    def __init__(self, symbols: int, sizes: dict[str, int], attention: Attention) -> None:
        super().__init__()
        width = sizes["width"]
        self.embedding = torch.nn.Embedding(symbols, width)
        self.position = torch.nn.Parameter(0.02 * torch.randn(sizes["seqlen"], width))
        blocks = (Block(width, sizes["heads"], attention) for _ in range(sizes["layers"]))
        self.blocks = torch.nn.Sequential(*blocks, torch.nn.LayerNorm(width))
        self.head = torch.nn.Linear(width, symbols)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens) + self.position))


def read_text(path: Path | None) -> bytes:
    """A file, or the reference of the Python language (about 500 kB of English), which every Python carries."""
    if path is not None:
        return path.read_bytes()
    from pydoc_data.topics import topics

    return "\n".join(topics.values()).encode()


def train(name: str, seed: int, written: bytes, sizes: dict[str, int], device: torch.device) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(seed)
    symbols, text = torch.unique(torch.frombuffer(bytearray(written), dtype=torch.uint8), return_inverse=True)
    model = LanguageModel(len(symbols), sizes, ATTENTIONS[name]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.Generator().manual_seed(seed)
    offsets, text = torch.arange(sizes["seqlen"] + 1), text.to(device)
    losses = []
    for _ in progress(range(sizes["steps"]), f"{name}, seed {seed}"):
        starts = torch.randint(len(text) - sizes["seqlen"], (sizes["batch"], 1), generator=batches)
        tokens = text[(starts + offsets).to(device)]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return [round(loss, 5) for loss in torch.stack(losses).tolist()]


def progress(steps: Iterable[int], title: str) -> Iterable[int]:
    try:
        from tqdm import tqdm
    except ImportError:
        print(f"{title} (pip install tqdm shows how far it is)")
        return steps
    return tqdm(steps, title, leave=False)


def pick_device(asked: str) -> torch.device:
    """The GPU if it is one that the engine serves, unless another device is asked for."""
    if asked == "auto":
        asked = "cpu"
        if torch.cuda.is_available():
            try:
                target.for_device(torch.cuda.current_device())
                asked = "cuda"
            except NotImplementedError as declined:
                print(f"not using the GPU: {declined}")
    return torch.device(asked)


def final(losses: list[float]) -> float:
    count = min(SMOOTHED_OVER, max(1, len(losses) // 4))
    return sum(losses[-count:]) / count


def summary(curves: dict[str, dict[str, list[float]]]) -> list[str]:
    """Final losses, and whether what differs between the two is within what differs between seeds."""
    seeds = sorted(curves["torch"], key=int)
    lines = [f"{'final loss':<12}" + "".join(f"{f'seed {seed}':>10}" for seed in seeds)]
    finals = {name: [final(curves[name][seed]) for seed in seeds] for name in curves}
    lines += [f"{name:<12}" + "".join(f"{loss:>10.4f}" for loss in losses) for name, losses in finals.items()]
    apart = max(abs(a - b) for a, b in zip(finals["torch"], finals["ours"], strict=True))
    lines.append(f"at most {apart:.4f} apart for one seed")
    if len(seeds) > 1:
        spread = max(max(losses) - min(losses) for losses in finals.values())
        verdict = "within" if apart <= spread else "NOT within"
        lines.append(f"{verdict} the {spread:.4f} that seeds differ by")
    return lines


def plot(record: dict[str, Any], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no plot: pip install matplotlib, then --replot draws {path}")
        return
    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
    for name, by_seed in record["curves"].items():
        for index, (seed, losses) in enumerate(by_seed.items()):
            line: dict[str, Any] = {
                "color": COLOURS[name],
                "linestyle": "-" if name == "torch" else (0, (3, 3)),
                "alpha": 1 - 0.4 * index,
            }
            axes.plot(losses, label=f"{name}, seed {seed}", linewidth=2.5 if name == "torch" else 1.5, **line)
    axes.set(
        xlabel="step", ylabel="loss per byte, nats", title=f"A character model; {record['device']}, {record['date']}"
    )
    axes.legend()
    figure.savefig(path, dpi=150)
    print(f"plot: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="toy", help="defaults of the numbers below")
    for name in SIZES["toy"]:
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument("--text", type=Path, help="default: alice.txt for the toy, else Python's language reference")
    parser.add_argument("--json", type=Path, default=Path("training.json"), help="where all losses go")
    parser.add_argument("--plot", type=Path, default=Path("training.png"), help="where the plot goes")
    parser.add_argument("--replot", type=Path, help="train nothing; draw the losses of this JSON file")
    options = parser.parse_args()

    if options.replot is None:
        sizes = {name: getattr(options, name) or default for name, default in SIZES[options.size].items()}
        device = pick_device(options.device)
        text = read_text(options.text or (ALICE if options.size == "toy" else None))
        curves = {
            name: {str(seed): train(name, seed, text, sizes, device) for seed in options.seeds} for name in ATTENTIONS
        }
        record: dict[str, Any] = {
            "device": torch.cuda.get_device_name(device)
            if device.type == "cuda"
            else "CPU, ours by the fp64 reference",
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "versions": {"cudnn_frost_sm120": cudnn_frost_sm120.__version__, "torch": torch.__version__},
            "sizes": sizes | {"bytes of text": len(text)},
            "final": {
                name: {seed: round(final(losses), 5) for seed, losses in c.items()} for name, c in curves.items()
            },
            "curves": curves,
        }
        options.json.write_text(json.dumps(record))
        print(f"losses: {options.json}")
    else:
        record = json.loads(options.replot.read_text())
    print(f"on {record['device']}, {record['sizes']}", *summary(record["curves"]), sep="\n")
    plot(record, options.plot)


if __name__ == "__main__":
    main()
