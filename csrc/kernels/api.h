// Libraries beside this one (csrc/lab, csrc/probe) call what FLUXION_API marks; everything else is hidden.
#pragma once

#define FLUXION_API __attribute__((visibility("default")))
