# shellcheck shell=bash
# NCCL's and gloo's settings for a cluster. What is set already stays.
#
#   SOCKET_INTERFACE  network interface of the hosts' names (`ip -br address`), such as eth0; unset: NCCL chooses
#   IB_CARDS          InfiniBand or RoCE cards for training traffic (`ibdev2netdev`), such as mlx5_0,mlx5_1; unset: all

# Where processes first find each other, and gloo's traffic. A node has several interfaces, and the first is not
# always one that other nodes reach.
if [[ -n ${SOCKET_INTERFACE:-} ]]; then
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$SOCKET_INTERFACE}
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$SOCKET_INTERFACE}
fi

# Which cards carry the data. Without it NCCL takes storage and management cards too. = asks for exactly these
# names: without it, mlx5_1 also means mlx5_10.
if [[ -n ${IB_CARDS:-} ]]; then
    export NCCL_IB_HCA=${NCCL_IB_HCA:-=$IB_CARDS}
fi

# An InfiniBand packet that gets no answer is sent again after 4.096 µs x 2^22 = 17 s, 7 times: a link that comes
# back within two minutes does not end a run of thousands of processes.
export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT:-22}
export NCCL_IB_RETRY_CNT=${NCCL_IB_RETRY_CNT:-7}

# A collective that fails, or takes longer than parallel.timeout_seconds, ends its process (3, torch's default; here
# so that no profile of the site has switched it off). Otherwise one dead node lets all others wait for ever.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-3}

# Then each process writes which collectives it was in: the ranks that are missing from the last one are those to
# look at. The buffer holds that many collectives.
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000}
export TORCH_FR_DUMP_TEMP_FILE=${TORCH_FR_DUMP_TEMP_FILE:-${logs:-.}/nccl-trace-}

# Versions and warnings. INFO shows which cards and algorithms were taken: for two nodes, not for 512.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
