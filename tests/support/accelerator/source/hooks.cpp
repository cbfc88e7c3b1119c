// What torch asks a device type: devices, streams and events (the guard), memory and generators (the hooks).
#include "hooks.h"

#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"
#include "pinned.h"
#include "random.h"
#include "tensors.h"

namespace sim {
namespace {

using c10::Device;
using c10::DeviceIndex;

void use_device(int device) {
  if (device < 0) return;
  streams_of(device);  // the device exists
  set_current_device(device);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  DeviceIndex deviceCount() const noexcept override { return num_devices(); }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }

  Device getDevice() const override { return Device(kSim, current_device()); }
  void setDevice(Device device) const override { use_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) set_current_device(device.index());
  }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  void synchronizeDevice(DeviceIndex device) const override {
    synchronize_device(device < 0 ? current_device() : device);
  }

  c10::Stream getStream(Device device) const override { return wrap(current_stream(index_of(device))); }
  c10::Stream getDefaultStream(Device device) const override { return wrap(streams_of(index_of(device))[0]); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device); }
  c10::Stream getNewStream(Device device, int = 0) const override {
    static std::array<std::atomic<uint32_t>, kMaxDevices> num_given;
    auto& streams = streams_of(index_of(device));
    return wrap(streams[1 + num_given[index_of(device)]++ % (kStreams - 1)]);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = wrap(current_stream(stream.device_index()));
    set_current_stream(unwrap(stream));
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    auto& it = unwrap(stream);
    return it.done.load() == it.issued();
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(unwrap(stream)); }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &unwrap(stream); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_use(data, unwrap(stream));
  }

  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    sim::record(*static_cast<Event*>(*event), unwrap(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait(unwrap(stream), *static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override { return !event || query(*static_cast<Event*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize(*static_cast<Event*>(event));
  }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    TORCH_CHECK(begin && end && queryEvent(begin) && queryEvent(end),
                "Both events must be recorded and completed before calculating elapsed time.");
    return *static_cast<Event*>(end)->milliseconds - *static_cast<Event*>(begin)->milliseconds;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return num_devices(); }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(DeviceIndex device) const override { use_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    int before = current_device();
    use_device(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }

  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override { return new_generator(device); }

  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  Device getDeviceFromPtr(void* address) const override { return Device(kSim, device_of(address)); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), num_bytes);
  }
};

}  // namespace

void register_hooks() {
  c10::SetAllocator(kSim, &allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  at::globalContext().lazyInitDevice(kSim);
}

}  // namespace sim
