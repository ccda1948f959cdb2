import torch
from torch import nn
class Enc(nn.Module):
    def __init__(self):
        super().__init__(); self.a = nn.Linear(4, 4); self.b = nn.Linear(4, 2)
    def forward(self, x, mask, scale=None):
        return self.b(self.a(x) * mask)
torch.manual_seed(0)
enc = Enc()
dec = nn.Linear(2, 4)
opt = torch.optim.SGD(list(enc.parameters()) + list(dec.parameters()), lr=0.1)
mse = nn.MSELoss()
loader = [dict(x=torch.randn(4, 4), mask=torch.ones(4, 1)) for _ in range(3)]
def evaluate(m):
    m.eval()
    r = m(loader[0]["x"], loader[0]["mask"]).sum().item()
    m.train()
    return r
for b in loader:
    z = enc(b["x"], mask=b["mask"])
    rec = dec(z)
    loss = mse(rec, b["x"])
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(evaluate(enc))
torch.save({"e": enc.state_dict(), "d": dec.state_dict()}, "model.pth")
