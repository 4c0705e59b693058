"""Teaches a small GPT-2 to add, with the Hugging Face Trainer. Runs alone, under torchrun and under Diamond; killed or
out of time, it goes on where it stopped when it is started again.

Needs transformers, accelerate and torch. Nothing is downloaded: model and data are made here.
"""

import os

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from diamond.train.adapters.huggingface import DiamondCallback, last_checkpoint

SIGNS = "0123456789+="
STEPS = int(os.environ.get("STEPS", "2000"))


class Sums(Dataset):
    """``37+05=042``, spelled in numbers of signs; only what stands after ``=`` is to be learnt."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last

    def __len__(self) -> int:
        return self._last - self._first

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        a, b = divmod((self._first + index) * 7919 % 10_000, 100)  # all pairs below 100, in a mixed order
        signs = torch.tensor([SIGNS.index(sign) for sign in f"{a:02}+{b:02}={a + b:03}"])
        labels = signs.clone()
        labels[:6] = -100
        return {"input_ids": signs, "labels": labels}


def share_right(predicted) -> dict[str, float]:
    guessed, wanted = predicted.predictions[:, 5:-1].argmax(-1), predicted.label_ids[:, 6:]
    return {"right": float((guessed == wanted).all(-1).mean())}


def main() -> None:
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 9, "vocab_size": len(SIGNS)}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"))
    args = TrainingArguments(
        output_dir="checkpoints",
        max_steps=STEPS,
        per_device_train_batch_size=64,
        per_device_eval_batch_size=250,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        logging_steps=20,
        eval_strategy="steps",
        eval_steps=max(1, STEPS // 5),
        use_cpu=not torch.cuda.is_available(),  # else ranks without a GPU do not find each other
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Sums(0, 9000),
        eval_dataset=Sums(9000, 10_000),
        compute_metrics=share_right,
        callbacks=[DiamondCallback()],
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(args.output_dir))
    result = trainer.evaluate()
    trainer.save_model("model")
    if trainer.is_world_process_zero():
        print(f"{result['eval_right']:.1%} of the sums it has never seen are right")


if __name__ == "__main__":
    main()
