"""Where the time and the memory of chosen training steps go: `steptron pretrain --profile`."""
