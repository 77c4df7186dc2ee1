"""The names of ``accelerate.commands.tpu``. TPUs are not supported: a call of any of them says so."""

from bigmodel.compat.refused import TPU, refused

main = refused("main", TPU)
tpu_command_launcher = refused("tpu_command_launcher", TPU)
tpu_command_parser = refused("tpu_command_parser", TPU)

if __name__ == "__main__":
    main()
