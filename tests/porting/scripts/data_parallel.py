import torch
import torch.nn as nn
from torch.utils.data import Dataset, DataLoader

# Parameters and DataLoaders
input_size = 5
output_size = 2

batch_size = 30
data_size = 100

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
torch.manual_seed(3)


class RandomDataset(Dataset):
    def __init__(self, size, length):
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index):
        return self.data[index]

    def __len__(self):
        return self.len


rand_loader = DataLoader(
    dataset=RandomDataset(input_size, data_size), batch_size=batch_size, shuffle=True
)


class Model(nn.Module):
    # Our model

    def __init__(self, input_size, output_size):
        super(Model, self).__init__()
        self.hidden = nn.Linear(input_size, 8)
        self.fc = nn.Linear(8, output_size)

    def forward(self, input):
        output = self.fc(self.hidden(input).tanh())
        return output


model = Model(input_size, output_size)
if torch.cuda.device_count() > 1:
  print("Let's use", torch.cuda.device_count(), "GPUs!")
  # dim = 0 [30, xxx] -> [10, ...], [10, ...], [10, ...] on 3 GPUs
  model = nn.DataParallel(model)

model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for data in rand_loader:
    input = data.to(device)
    output = model(input)
    loss = output.pow(2).sum(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("Outside: input size", input.size(), "output_size", output.size())

torch.save(model.state_dict(), "model.pth")
