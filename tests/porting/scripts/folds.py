import torch
from torch import nn
torch.manual_seed(0)
data = [(torch.randn(4, 4), torch.randn(4, 2), torch.rand(4, 1)) for _ in range(3)]
for fold in range(2):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.MSELoss(reduction="none")
    for x, y, w in data:
        out = model(x)
        loss = (criterion(out, y) * w).mean()
        if torch.isnan(loss):
            continue
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters=model.parameters(), max_norm=1.0)
        optimizer.step()
    print(loss)
torch.save(model.state_dict(), "model.pth")
