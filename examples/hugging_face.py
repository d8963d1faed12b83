"""Harmless transfer on the input embeddings of a Hugging Face model; nothing is downloaded.

    pip install "rarebit[examples]"
    python examples/hugging_face.py

The model is a small GPT-2 with random weights. Its output weights are tied to its input embeddings, which the
transfer finds out by itself.
"""

import torch
from _shared import VOCABULARY, make_text, tell
from transformers import GPT2Config, GPT2LMHeadModel

import rarebit as rb

LENGTH, LINES, BATCH = 24, 960, 32


def main() -> None:
    """Train, and tell what the transfer did."""
    torch.manual_seed(0)
    text = make_text(LINES, LENGTH)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    model = GPT2LMHeadModel(config)
    inputs = model.get_input_embeddings()
    [name] = [name for name, module in model.named_modules() if module is inputs]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    counts = text.reshape(-1).bincount(minlength=VOCABULARY)
    losses = []
    with rb.HarmlessTransfer().start(
        model, text, counts=counts, where=lambda table: table.name == name
    ) as transfer:
        for _ in range(3):
            for lines in torch.randperm(LINES).split(BATCH):
                loss = model(input_ids=text[lines], labels=text[lines]).loss
                transfer.backward(loss)  # the only changed line; it was loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    tell(transfer, losses)


if __name__ == "__main__":
    main()
