"""LoRA adapters of a small GPT-2 on every device: python examples/gpt2_lora.py, or

outrider run --devices cpu,cpu@0.4 examples/gpt2_lora.py --through trainer --text some.txt

The model is made from a config and reads bytes, so nothing is downloaded; in its place load your own with
`from_pretrained`. Ranks average the adapters only. `--through loop` is a loop of your own, `--through trainer` the
Trainer of transformers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

import outrider
from outrider.integrations.huggingface import Trainer

LENGTH = 64


def make_model() -> Any:
    set_seed(0)
    tokens = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
    base = GPT2LMHeadModel(GPT2Config(n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, **tokens))
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules=["c_attn", "c_fc", "c_proj"], task_type="CAUSAL_LM")
    return get_peft_model(base, adapters)


def read_pieces(path: Path) -> list[dict[str, torch.Tensor]]:
    """The text in pieces of equal length."""
    text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
    pieces = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


@torch.no_grad()
def mean_loss(model: Any, pieces: list[dict[str, torch.Tensor]]) -> float:
    model.eval()
    device = next(model.parameters()).device
    tokens = torch.stack([piece["input_ids"] for piece in pieces]).to(device)
    loss = float(model(input_ids=tokens, labels=tokens).loss)
    model.train()
    return loss


def fit_in_loop(model: Any, pieces: list[dict[str, torch.Tensor]], wishes: argparse.Namespace) -> bool:
    """Train in a loop of your own; returns whether this is rank 0, which writes."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=wishes.rate)
    with outrider.Session(policy=wishes.policy) as s:
        model, optimizer = s.prepare(model, optimizer)
        for _ in s.epochs(wishes.epochs):
            for batch in s.batches(pieces, batch_size=8):
                s.step(model(**batch).loss)
        return s.is_main


def fit_with_trainer(model: Any, pieces: list[dict[str, torch.Tensor]], wishes: argparse.Namespace) -> bool:
    """Train with the Trainer; returns whether this is rank 0, which writes."""
    args = TrainingArguments(
        output_dir="checkpoints",
        per_device_train_batch_size=8,
        num_train_epochs=wishes.epochs,
        learning_rate=wishes.rate,
        lr_scheduler_type="constant",
        save_strategy="epoch",
        report_to=[],
    )
    trainer = Trainer(model=model, args=args, train_dataset=pieces, session_options={"policy": wishes.policy})
    trainer.train()
    return bool(args.process_index == 0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--through", default="loop", choices=["loop", "trainer"])
    parser.add_argument("--policy", default="balanced", choices=["sync", "balanced", "cadence", "async", "auto"])
    parser.add_argument("--text", type=Path, default=Path(__file__))
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1e-2)
    wishes = parser.parse_args()

    pieces = read_pieces(wishes.text)
    train_set, held_out = pieces[4:], pieces[:4]
    model = make_model()
    before = mean_loss(model, held_out)
    fit = fit_in_loop if wishes.through == "loop" else fit_with_trainer
    if fit(model, train_set, wishes):
        print(f"loss of the held-out text before: {before:.2f}")
        print(f"loss of the held-out text after: {mean_loss(model, held_out):.2f}")
        model.save_pretrained("adapters")


if __name__ == "__main__":
    main()
