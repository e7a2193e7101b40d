"""What this machine can run, what it cannot and why, and the command that mends it. `tileflash doctor` prints it.

Everything that may crash, hang or abort (importing PyTorch, Triton and other attention libraries, running a kernel) happens in
child processes with a time limit. Nothing here imports PyTorch or Triton outside of them.
"""
