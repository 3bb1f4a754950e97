"""A script in the shape of accelerate's nlp_example, on every device: python examples/accelerate_nlp.py, or

outrider run --devices cpu,cpu@0.4 examples/accelerate_nlp.py

The only difference to a script of accelerate is where `Accelerator` comes from. Sentences and model are made here, so
that nothing is downloaded: a sentence is positive if it has more words of one half of the vocabulary than of the other.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from outrider.integrations.accelerate import Accelerator

WORDS = 40


def make_sentences(count: int, seed: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 16, (count,), generator=generator).tolist()
    words = [torch.randint(1, WORDS, (length,), generator=generator) for length in lengths]
    return [{"words": one, "label": int((one > WORDS // 2).float().mean() > 0.5)} for one in words]


def collate(sentences: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad to the longest sentence of the batch."""
    inputs = torch.nn.utils.rnn.pad_sequence([one["words"] for one in sentences], batch_first=True)
    labels = torch.tensor([one["label"] for one in sentences])
    return {"input_ids": inputs, "attention_mask": (inputs > 0).long(), "labels": labels}


def get_dataloaders(accelerator: Any, batch_size: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    with accelerator.main_process_first():
        train_set, eval_set = make_sentences(400, seed=1), make_sentences(101, seed=2)
    train_dataloader = DataLoader(train_set, shuffle=True, collate_fn=collate, batch_size=batch_size)  # type: ignore[arg-type]
    eval_dataloader = DataLoader(eval_set, shuffle=False, collate_fn=collate, batch_size=32)  # type: ignore[arg-type]
    return train_dataloader, eval_dataloader


def training_function(wishes: argparse.Namespace) -> None:
    accelerator = Accelerator(
        mixed_precision=wishes.mixed_precision,
        gradient_accumulation_steps=wishes.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    set_seed(42)
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, batch_size=4)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(vocab_size=WORDS, max_position_embeddings=16, **size, **dropout))
    model = model.to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=5e-3)
    num_steps = len(train_dataloader) * wishes.num_epochs // wishes.gradient_accumulation_steps
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=10, num_training_steps=num_steps)

    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(wishes.num_epochs):
        model.train()
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

        model.eval()
        right, count = 0, 0
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            right, count = right + int((predictions == references).sum()), count + len(references)
        rate = lr_scheduler.get_last_lr()[0]
        accelerator.print(f"epoch {epoch}: accuracy {right / count:.4f} of {count}, rate {rate:.6f}")

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained("classifier")
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", default="no", choices=["no", "fp16", "bf16"])
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--num_epochs", type=int, default=3)
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
