"""Run `unisono` as on a machine with two GPUs and three cores, whose torch can use them."""

from unisono.launch import placement

placement.gpus_of_driver = lambda: ("GPU-aa", "GPU-bb")
placement.torch_for_cpus_alone = lambda: ""
placement.num_devices = lambda: 3

if __name__ == "__main__":
    from unisono.cli import main

    main()
