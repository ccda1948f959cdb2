import torch
from torch import nn, optim


def main():
    torch.manual_seed(0)
    input, target = torch.randn(8, 4), torch.randn(8, 2)
    seq = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    criterion = nn.MSELoss()
    # use LBFGS as optimizer since we can load the whole data to train
    optimizer = optim.LBFGS(seq.parameters(), lr=0.8, max_iter=3)
    for i in range(2):
        print("STEP: ", i)

        def closure():
            optimizer.zero_grad()
            out = seq(input)
            loss = criterion(out, target)
            print("loss:", loss.item())
            loss.backward()
            return loss

        optimizer.step(closure)
    torch.save(seq.state_dict(), "model.pth")


main()
