// The table of functions that host code works a device by (device/device_api.h).
#pragma once

#include "device/device_api.h"

namespace fluxion::device {

const DeviceApi* device_api();

}  // namespace fluxion::device
