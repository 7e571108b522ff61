#include <torch/library.h>

// Every operation adds itself in its own file (TORCH_LIBRARY_FRAGMENT): torch.ops.steptron_kernels.NAME.
TORCH_LIBRARY(steptron_kernels, library) {}
