// A program of the build: prints the best instruction set of this machine.
#include <cstdio>

#include "kernels/cpu.h"

int main() { std::puts(fluxion::supported().best()); }
