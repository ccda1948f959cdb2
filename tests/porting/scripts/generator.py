"""A loop over a generator, which can be read only once."""

import torch
import torch.nn.functional as F

torch.manual_seed(0)


def stream():
    for _ in range(5):
        yield torch.randn(4, 6), torch.randint(0, 3, (4,))


net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
optimizer = torch.optim.AdamW([{"params": net.parameters(), "weight_decay": 0.1}], lr=1e-2)
batches = stream()
for x, y in batches:
    outputs = net(x)
    loss = F.cross_entropy(outputs, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.save(net.state_dict(), "model.pth")
