import torch; from torch import nn, optim
import torch.nn.functional as F
torch.manual_seed(0); ps = 3; pipe = "ü"
ü = "é"; modèle = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)); modèle.train()
opt = optim.SGD(params=modèle.parameters(), lr=0.1)
loader = [(torch.randn(4, 4), torch.randint(0, 2, (4,))) for _ in range(3)]
from tqdm import tqdm
for i, (x, y) in enumerate(tqdm(loader, desc="é")):
	out = modèle(x); loss = F.cross_entropy(out, y, reduction="sum")
	modèle.zero_grad(); loss.backward()
	opt.step()
torch.save(modèle.state_dict(), "model.pth")
