import torch
from torch import nn
import torch.nn.functional as F

def build():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    return net

def configure(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)

def fit(*, model, loader, optimizer, epochs=2, use_amp=False):
    scaler = torch.amp.GradScaler("cpu", enabled=use_amp)
    history = []
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            if use_amp:
                with torch.autocast("cpu"):
                    out = model(x)
                    loss = F.cross_entropy(out, y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                out = model(x)
                loss = F.cross_entropy(out, y)
                loss.backward()
                optimizer.step()
            history.append(loss.item())
            acc = (out.argmax(1) == y).float().mean()
    return history

if __name__ == "__main__":
    torch.manual_seed(0)
    model = build()
    opt = configure(model)
    loader = [(torch.randn(4, 4), torch.randint(0, 2, (4,))) for _ in range(3)]
    print(fit(model=model, loader=loader, optimizer=opt, use_amp=False))
    torch.save(model.state_dict(), "model.pth")
