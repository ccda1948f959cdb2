import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import Adam

torch.manual_seed(0)
accum_iter = 2


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        yield {
            "x": torch.randn(4, 6, generator=generator),
            "y": torch.randint(0, 3, (4,), generator=generator),
        }


net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
optimizer = Adam(filter(lambda p: p.requires_grad, net.parameters()), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
history = []
for batch_idx, batch in enumerate(batches()):
    # forward pass
    preds = net(batch["x"])
    loss = F.cross_entropy(preds, batch["y"])

    # normalize loss to account for batch accumulation
    loss = loss / accum_iter

    # backward pass
    loss.backward()
    history.append(loss.item())

    # weights update
    if ((batch_idx + 1) % accum_iter == 0) or (batch_idx + 1 == 6):
        clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
print(history)
torch.save(net.state_dict(), "model.pth")
