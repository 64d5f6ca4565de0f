"""What kernels and tasks compute, in torch, from the definitions: what the native code is compared with."""
