"""Replay of many plans at once: one program for each retention group of each plan, all decode steps in one launch.

The plain reference of these kernels is `kvsim.engines.stepper`, and `kvsim.engines.gpu` prepares their arguments.
`kvsim_kernels.replay.resident` holds the survivors of linear rules in registers; `kvsim_kernels.replay.general` runs
everything else, and the steps on which more is visible than fits. `kvsim_kernels.replay.window` replays linear rules on
the rows of one pass of a closed loop; its plain reference is `kvsim.live.device.stepper`.
"""
