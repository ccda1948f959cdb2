"""Fine-tunes a causal language model with LoRA, by peft."""

import argparse

import torch
from peft import LoraConfig, TaskType, get_peft_model, get_peft_model_state_dict
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

import penstock as ps


def sentences(count: int, length: int, vocab: int) -> list[dict[str, torch.Tensor]]:
    """Prompts, which do not count in the loss, and answers that repeat them."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(count):
        prompt = torch.randint(3, vocab, (length // 2,), generator=draw)
        cut = int(torch.randint(2, length // 2, (), generator=draw))
        ids = torch.cat([prompt, prompt[:cut], torch.zeros(length // 2 - cut, dtype=torch.long)])
        labels = ids.clone()
        labels[: length // 2] = -100
        labels[length // 2 + cut :] = -100
        mask = torch.ones_like(ids)
        mask[length // 2 + cut :] = 0
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--output", default="lora.pt")
    args = parser.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config)
    peft_config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=args.rank,
        lora_alpha=16,
        lora_dropout=0.05,
        target_modules=["q_proj", "v_proj"],
    )
    model = get_peft_model(model, peft_config)
    model.print_trainable_parameters()
    loader = DataLoader(sentences(32, 16, 64), args.batch_size, shuffle=True)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=args.lr, weight_decay=0.0
    )
    steps = args.num_epochs * len(loader) // args.gradient_accumulation_steps
    lr_scheduler = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)

    pipe = ps.Pipeline(model, kwargs=next(iter(loader)), devices=2)
    for epoch in range(args.num_epochs):
        model.train()
        total_loss = 0.0
        for step, batch in enumerate(loader):
            loss = pipe.train_step(
                **batch,
                target=batch["labels"],
                loss_fn=lambda output, _: output.loss / args.gradient_accumulation_steps,
                weight=lambda labels: (labels[:, 1:] != -100).sum(),
            )
            total_loss += loss.float()
            if (step + 1) % args.gradient_accumulation_steps == 0:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        print(f"epoch {epoch}: loss {total_loss / len(loader):.4f}")

    torch.save(get_peft_model_state_dict(model), args.output)


if __name__ == "__main__":
    main()
