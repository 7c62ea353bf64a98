"""Run `unisono` as on a machine with two GPUs and three cores."""

from unisono.runtime.launch import placement

placement.gpus_of_driver = lambda: (placement.DriverGpu("GPU-aa"), placement.DriverGpu("GPU-bb"))
placement.num_devices = lambda: 3

if __name__ == "__main__":
    from unisono.tools.cli import main

    main()
