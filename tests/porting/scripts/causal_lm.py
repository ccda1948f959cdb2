import torch
from transformers import GPT2Config, GPT2LMHeadModel
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=40, n_positions=16, resid_pdrop=0., embd_pdrop=0., attn_pdrop=0.))
ids = [torch.randint(0, 40, (4, 8)) for _ in range(3)]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for input_ids in ids:
    loss = model(input_ids=input_ids, labels=input_ids.clone()).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
torch.save(model.state_dict(), "model.pth")
