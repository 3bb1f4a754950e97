"""Programs of Hugging Face users, which the tests run as one rank or several."""

from __future__ import annotations

import contextlib
import io
import os
import random
import runpy
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import datasets
import peft
import safetensors.torch
import tokenizers
import torch
import transformers
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, IterableDataset
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

import outrider
from outrider.api.session import open_session
from outrider.integrations.accelerate import Accelerator
from outrider.integrations.huggingface import OutriderMixin, Trainer

VOCABULARY = 64
NUM_SAMPLES = 44
NUM_EVALUATED = 21


def make_model(*, dropout: float = 0.0) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(n_positions=32, n_embd=32, n_layer=2, n_head=2, **tokens, **rates))


def make_data(count: int = NUM_SAMPLES) -> list[dict[str, torch.Tensor]]:
    """Texts of which different parts are to be learned: the mean of a batch is one of tokens, not of samples."""
    generator = torch.Generator().manual_seed(1)
    data = []
    for number in range(count):
        tokens = torch.randint(0, VOCABULARY, (16,), generator=generator)
        labels = tokens.clone()
        labels[: number % 9] = -100
        data.append({"input_ids": tokens, "labels": labels})
    return data


class Impatient(TrainerCallback):
    """Ends the training on rank 0 alone, at a step at which nothing else is due."""

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.is_world_process_zero and state.global_step == 5:
            control.should_training_stop = True


class Terminating(TrainerCallback):
    """Sends SIGTERM to rank 1, as a scheduler does before it takes a machine away."""

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if args.process_index == 1 and state.global_step == 5:
            os.kill(os.getpid(), signal.SIGTERM)


CALLBACKS: dict[str, Callable[[], TrainerCallback]] = {
    "impatient": Impatient,
    "terminating": Terminating,
    "early stopping": lambda: EarlyStoppingCallback(early_stopping_patience=1),
}


class Watching(TrainerCallback):
    """Remembers what the Trainer tells its callbacks."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []
        self.steps: list[int] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        kept = {name: value for name, value in logs.items() if "second" not in name and "runtime" not in name}
        self.logs.append({"step": state.global_step, **kept})

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.steps.append(state.global_step)


def accuracy(prediction: Any) -> dict[str, float]:
    """Depends on the order and the number of predictions."""
    guesses, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
    weights = torch.arange(1, len(guesses) + 1).numpy()[:, None]
    return {"count": len(guesses), "weighted": float(((guesses == labels) * weights).sum() / weights.sum())}


def train(
    *,
    policy: str | None = "balanced",
    resume: str | None = None,
    options: dict[str, Any] | None = None,
    callback: str | None = None,
    session: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Fine-tune with the Trainer; policy None: with that of transformers alone."""
    model, watching = make_model(), Watching()
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_steps": 4,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "max_grad_norm": 0.5,
        "seed": 3,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "include_num_input_tokens_seen": True,
        **(options or {}),
    }
    data = make_data()
    shared: dict[str, Any] = {
        "model": model,
        "args": TrainingArguments(output_dir="out", **settings),
        "train_dataset": data,
        "eval_dataset": data[:NUM_EVALUATED],
        "compute_metrics": accuracy,
        "callbacks": [watching, *([] if callback is None else [CALLBACKS[callback]()])],
    }
    if policy is None:
        trainer: transformers.Trainer = transformers.Trainer(**shared)
    else:
        trainer = Trainer(**shared, session_options={"policy": policy, "run_dir": "run", **(session or {})})
    try:
        result = trainer.train(resume_from_checkpoint=resume)
    except SystemExit as ending:
        return {"code": ending.code, "steps": watching.steps, "files": checkpoint_files()}
    trainer.save_model("final")
    return {
        "rank": trainer.args.process_index,
        "steps": watching.steps,
        "logs": watching.logs,
        "global_step": result.global_step,
        "train_loss": result.training_loss,
        "weights": fingerprint(model),
        "tokens": float(trainer.state.num_input_tokens_seen),
        "evaluated": trainer.evaluate(),
        "best": trainer.state.best_model_checkpoint,
        "is_wrapped": trainer.model_wrapped is not model,
        "files": checkpoint_files(),
        "last_rate": trainer.lr_scheduler.get_last_lr(),
        "rates": [log["learning_rate"] for log in watching.logs if "learning_rate" in log],
    }


def checkpoint_files() -> list[str]:
    return sorted(str(path) for path in Path().rglob("checkpoint-*/*"))


def fingerprint(model: torch.nn.Module) -> list[float]:
    """A few values of each parameter."""
    return [float(value) for p in model.parameters() for value in p.detach().flatten()[:: max(1, p.numel() // 8)]]


class PackedLinear(torch.nn.Linear):
    """A frozen layer as QLoRA has it: two weights of four bits in a byte, and a scale per row."""

    def __init__(self, layer: Any) -> None:
        in_features, out_features = layer.weight.shape
        super().__init__(in_features, out_features)
        weight = layer.weight.detach().T
        scale = weight.abs().amax(1, keepdim=True) / 7
        codes = (weight / scale).round().add(8).to(torch.uint8)
        self.weight = torch.nn.Parameter(codes[:, ::2] * 16 + codes[:, 1::2], requires_grad=False)  # type: ignore[assignment]
        self.scale = torch.nn.Parameter(scale, requires_grad=False)
        self.bias.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        codes = torch.stack([self.weight // 16, self.weight % 16], -1).flatten(1)
        return torch.nn.functional.linear(inputs, (codes.float() - 8) * self.scale, self.bias)


def make_packed_lora() -> Any:
    model = make_model()
    for block in model.transformer.h:
        block.attn.c_attn = PackedLinear(block.attn.c_attn)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM"))


def lora(*, policy: str | None, resume: str | None = None) -> dict[str, Any]:
    """Fine-tune adapters of a packed model with the Trainer; policy None: with that of transformers alone."""
    model = make_packed_lora()
    args = TrainingArguments(
        output_dir="out",
        report_to=[],
        use_cpu=True,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        num_train_epochs=2,
        save_steps=4,
        seed=3,
    )
    shared: dict[str, Any] = {"model": model, "args": args, "train_dataset": make_data()}
    options = {"policy": policy, "run_dir": "run"}
    trainer = transformers.Trainer(**shared) if policy is None else Trainer(**shared, session_options=options)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model("final")
    return _told_of_lora(model)


def lora_loop(*, policy: str) -> dict[str, Any]:
    """The same in a loop of the user's own."""
    model = make_packed_lora()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    with outrider.Session(policy=policy, run_dir="run", seed=3) as s:
        model, optimizer = s.prepare(model, optimizer)
        for _ in s.epochs(2):
            for batch in s.batches(make_data(), batch_size=4):
                s.step(model(**batch).loss)
        if s.is_main:
            model.save_pretrained("final")
    return _told_of_lora(model)


def _told_of_lora(model: Any) -> dict[str, Any]:
    trained = [p for p in model.parameters() if p.requires_grad]
    packed = [p for p in model.parameters() if p.dtype == torch.uint8]
    return {
        "trained": sum(p.numel() for p in trained),
        "all": sum(p.numel() for p in model.parameters()),
        "weights": [float(value) for p in trained for value in p.detach().flatten()],
        "packed": [int(p.long().sum()) for p in packed],
    }


WORDS = ("the", "slow", "fast", "device", "rides", "ahead", "and", "rejoins", "sets", "pace", "column", "of")


def make_tokenizer() -> Any:
    """One token per word."""
    vocabulary = {word: number for number, word in enumerate(("<end>", "<pad>", "<unknown>", *WORDS))}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unknown>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # type: ignore[assignment]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<pad>")


def make_dialogues(count: int = NUM_SAMPLES) -> Any:
    """Prompts and completions of unequal length, of which TRL trains the completions."""
    numbers = random.Random(1)
    rows = [
        {
            "prompt": " ".join(numbers.choices(WORDS, k=1 + number % 4)),
            "completion": " " + " ".join(numbers.choices(WORDS, k=1 + number % 7)),
        }
        for number in range(count)
    ]
    return datasets.Dataset.from_list(rows)


def sft(*, policy: str | None, resume: str | None = None) -> dict[str, Any]:
    """Fine-tune adapters with TRL's SFTTrainer; policy None: without a session."""
    # Not at the top: its import takes many seconds, and only this needs it.
    from trl import SFTConfig, SFTTrainer

    class SessionTrainer(OutriderMixin, SFTTrainer): ...

    args = SFTConfig(
        output_dir="out",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_length=16,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        num_train_epochs=2,
        logging_steps=1,
        save_steps=4,
        eval_strategy="epoch",
        seed=3,
    )
    shared: dict[str, Any] = {
        "model": make_model(),
        "args": args,
        "train_dataset": make_dialogues(),
        "eval_dataset": make_dialogues(NUM_EVALUATED),
        "processing_class": make_tokenizer(),
        "peft_config": peft.LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM"),
    }
    options = {"policy": policy, "run_dir": "run"}
    trainer = SFTTrainer(**shared) if policy is None else SessionTrainer(**shared, session_options=options)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model("final")
    logs = trainer.state.log_history
    return {
        **_told_of_lora(trainer.model),
        "losses": [log["loss"] for log in logs if "loss" in log],
        "evaluated": [log["eval_loss"] for log in logs if "eval_loss" in log],
        "steps": trainer.state.global_step,
    }


def reload() -> dict[str, Any]:
    """Train, save, and load what was saved as a user of the model does."""
    model = make_model()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(output_dir="out", report_to=[], use_cpu=True, max_steps=2, save_strategy="no"),
        train_dataset=make_data(),
        session_options={"policy": "balanced"},
    )
    trainer.train()
    trainer.save_model("saved")
    model.save_pretrained("pretrained")
    loaded = [fingerprint(GPT2LMHeadModel.from_pretrained(name)) for name in ("saved", "pretrained")]
    trainer.train()
    with contextlib.suppress(outrider.errors.ConfigError):
        trainer.train(trial={"learning_rate": 1.0})
        raise AssertionError("a search was not refused")
    return {
        "trained": loaded[0] != fingerprint(make_model()),
        "loaded": loaded,
        "again": trainer.state.global_step,
        "went_on": fingerprint(model) != loaded[0],
    }


def inside_a_session(**options: Any) -> dict[str, Any]:
    """The Trainer in a session that the user has opened."""
    with outrider.Session(policy="cadence", **options) as s:
        trainer = Trainer(
            model=make_model(),
            args=TrainingArguments(output_dir="out", report_to=[], use_cpu=True, max_steps=2, save_strategy="no"),
            train_dataset=make_data(),
        )
        trainer.train()
        return {"is_mine": trainer.session is s, "gathered": s.gather(trainer.state.global_step)}


def script(*, path: str, arguments: list[str]) -> str:
    """What a script prints on this rank."""
    sys.argv = [path, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def accelerated(*, policy: str) -> dict[str, Any]:
    """A loop of accelerate, and what its ranks tell each other."""
    accelerator = Accelerator(session_options={"policy": policy, "run_dir": "run"})
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(make_data(), batch_size=8, shuffle=True)  # type: ignore[arg-type]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    refused = ""
    for _ in range(2):
        model.train()
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            try:
                accelerator.gather(loss)
            except outrider.errors.ConfigError as error:
                refused = str(error)
    rank = accelerator.process_index
    gathered = accelerator.gather(torch.tensor([rank, rank + 10]))
    padded = accelerator.pad_across_processes(torch.tensor([5, 6][: rank + 1]), pad_index=-1)
    reduced = accelerator.reduce(torch.tensor(float(2 * rank)), "mean")
    accelerator.end_training()
    return {
        "weights": fingerprint(model),
        "ticks": schedule.scheduler.last_epoch,
        "gathered": gathered.tolist(),
        "reduced": reduced.item(),
        "padded": padded.tolist(),
        "refused": refused,
    }


def accumulating(*, policy: str | None) -> dict[str, Any]:
    """Accumulation, clipping by value, a trigger of one rank, and a saved model; policy None: accelerate alone."""
    options = {"policy": policy, "run_dir": "run", "seed": 3}
    accelerator: Any = (
        accelerate.Accelerator(gradient_accumulation_steps=2)
        if policy is None
        else Accelerator(gradient_accumulation_steps=2, session_options=options)
    )
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # Every token is learned, so that the mean of a batch is one of samples, and no batch is shorter than the others.
    data = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in make_data(48)]
    loader = DataLoader(data, batch_size=8)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_value_(model.parameters(), 0.01)
                optimizer.step()
                optimizer.zero_grad()
    if accelerator.process_index == accelerator.num_processes - 1:
        accelerator.set_trigger()
    answers = [accelerator.check_trigger(), accelerator.check_trigger()]
    accelerator.save_model(model, "saved")
    accelerator.wait_for_everyone()
    saved = make_model()
    missing = saved.load_state_dict(safetensors.torch.load_file("saved/model.safetensors"), strict=False).missing_keys
    accelerator.end_training()
    return {
        "weights": fingerprint(model),
        "saved": fingerprint(saved),
        "missing": missing,
        "answers": answers,
    }


def accelerator_refusals() -> dict[str, str]:
    """What the Accelerator says to what it cannot honour in a session."""
    wishes: dict[str, Callable[[], Any]] = {
        "fsdp_plugin": lambda: Accelerator(fsdp_plugin=True),
        "split_batches": lambda: Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True)),
        "step_scheduler_with_optimizer": lambda: Accelerator(step_scheduler_with_optimizer=False),
        "checkpoint_every": lambda: Accelerator(session_options={"checkpoint_every": 1}),
        "skip_first_batches": lambda: Accelerator().skip_first_batches([], 2),
        "backward": lambda: Accelerator().backward(torch.zeros(())),
        "trigger_sync_in_backward": lambda: Accelerator().trigger_sync_in_backward(None),
    }
    told = {}
    for name, wish in wishes.items():
        told[name] = "nothing was refused"
        try:
            wish()
        except outrider.errors.ConfigError as error:
            told[name] = str(error)
        session = open_session()
        if session is not None:
            session.close()
    return told


def refusals() -> dict[str, str]:
    """What the Trainer says to arguments that it cannot honour in a session."""
    return {
        name: _refusal(arguments, options, dataset)
        for name, (arguments, options, dataset) in {
            "auto_find_batch_size": ({"auto_find_batch_size": True}, {}, None),
            "optim": ({"optim": "galore_adamw_layerwise", "optim_target_modules": "all-linear"}, {}, None),
            "batch_rebalance": ({"train_sampling_strategy": "batch_rebalance"}, {}, None),
            "enable_jit_checkpoint": ({"enable_jit_checkpoint": True}, {}, None),
            "split_batches": ({"accelerator_config": {"split_batches": True}}, {}, None),
            "dispatch_batches": ({"accelerator_config": {"dispatch_batches": True}}, {}, None),
            "sync_each_batch": (
                {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
                {},
                None,
            ),
            "ddp_timeout": ({"ddp_timeout": 60}, {}, None),
            "ddp_broadcast_buffers": ({"ddp_broadcast_buffers": True}, {}, None),
            "checkpoint_every": ({}, {"checkpoint_every": 1}, None),
            "stream": ({"max_steps": 2}, {}, Stream()),
            "not finite": ({"learning_rate": 1e30, "max_grad_norm": 0, "max_steps": 4}, {}, None),
            # The last one, because it leaves its mark on the environment.
            "fsdp": ({"fsdp": True}, {}, None),
        }.items()
    }


class Stream(IterableDataset[Any]):
    """Data without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(make_data())


def _refusal(arguments: dict[str, Any], options: dict[str, Any], dataset: Any) -> str:
    told = "nothing was refused"
    try:
        args = TrainingArguments(output_dir="out", report_to=[], use_cpu=True, **arguments)
        trainer = Trainer(
            model=make_model(), args=args, train_dataset=dataset or make_data(), session_options=options or None
        )
        trainer.train()
    except outrider.errors.OutriderError as error:
        told = f"{error}"
    session = open_session()
    if session is not None:
        session.close()
    return told


class Translating(OutriderMixin, transformers.Seq2SeqTrainer):
    """A Trainer class that is not ours, which generates texts when it evaluates."""


def exactness(prediction: Any) -> dict[str, float]:
    """Of generated tokens, the part that is right: depends on the order of the data set."""
    labels, guesses = prediction.label_ids, prediction.predictions[:, 1:]
    width = min(labels.shape[1], guesses.shape[1])
    return {"count": len(guesses), "right": float((guesses[:, :width] == labels[:, :width]).mean())}


def translate(*, policy: str | None = "balanced") -> dict[str, Any]:
    """Learn to reverse texts with an encoder and a decoder; policy None: with the Trainer of transformers alone."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    tokens = {"vocab_size": VOCABULARY, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **tokens))
    texts = torch.randint(2, VOCABULARY, (NUM_SAMPLES, 8), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": text, "labels": text.flip(0)} for text in texts]
    watching = Watching()
    arguments = transformers.Seq2SeqTrainingArguments(
        output_dir="out",
        per_device_train_batch_size=4,
        num_train_epochs=2,
        logging_steps=5,
        eval_strategy="epoch",
        save_strategy="no",
        learning_rate=1e-2,
        predict_with_generate=True,
        generation_max_length=9,
        seed=3,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    shared: dict[str, Any] = {
        "model": model,
        "args": arguments,
        "train_dataset": data,
        "eval_dataset": data[:NUM_EVALUATED],
        "compute_metrics": exactness,
        "callbacks": [watching],
    }
    if policy is None:
        trainer: transformers.Trainer = transformers.Seq2SeqTrainer(**shared)
    else:
        trainer = Translating(**shared, session_options={"policy": policy})
    trainer.train()
    return {"weights": fingerprint(model), "logs": watching.logs}
