// Kernels, memory, streams, generators and collectives of the device of tests/separate.
//
// Its memory is the host's. Each operation runs at once, in a kernel of the CPU. A stream is a number, an event a time.

#include <ATen/EmptyTensor.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_dropout_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <unordered_set>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;

c10::DeviceIndex num_devices() {
  static const char* given = std::getenv("ZEROBUBBLE_SEPARATE_DEVICES");
  static const auto found = static_cast<c10::DeviceIndex>(given ? std::atoi(given) : 1);
  return found;
}

thread_local c10::DeviceIndex current = 0;
thread_local std::unordered_map<c10::DeviceIndex, c10::StreamId> streams;
std::atomic<c10::StreamId> num_streams{0};

struct Event {
  std::chrono::steady_clock::time_point at;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = current;
    setDevice(device);
    return {KIND, before};
  }
  c10::Device getDevice() const override { return {KIND, current}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.type() == KIND && device.index() < num_devices(), "no such device: ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::Device whole(c10::Device device) const { return device.index() < 0 ? getDevice() : device; }
  c10::Stream getStream(c10::Device device) const override {
    device = whole(device);
    return c10::Stream(c10::Stream::UNSAFE, device, streams[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::UNSAFE, whole(device), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, whole(device), ++num_streams);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices(); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->at = std::chrono::steady_clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first && second, "both events must be recorded");
    const auto apart = static_cast<Event*>(second)->at - static_cast<Event*>(first)->at;
    return std::chrono::duration<double, std::milli>(apart).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? std::malloc(bytes) : nullptr;
    TORCH_CHECK_WITH(OutOfMemoryError, data || !bytes, "separate out of memory: ", bytes, " bytes were asked for");
    return {data, data, &std::free, c10::Device(KIND, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(KIND, &memory);

std::mutex pinned_mutex;
std::unordered_set<const void*> pinned;

void free_pinned(void* data) {
  std::lock_guard lock(pinned_mutex);
  pinned.erase(data);
  std::free(data);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = std::malloc(bytes ? bytes : 1);
    std::lock_guard lock(pinned_mutex);
    pinned.insert(data);
    return {data, data, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};
PinnedMemory pinned_memory;

// A generator of the device, which draws from one of the CPU of its own.
struct Generator final : c10::GeneratorImpl {
  at::Generator inner = at::detail::createCPUGenerator();
  explicit Generator(c10::DeviceIndex index) : c10::GeneratorImpl(c10::Device(KIND, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->inner = inner.clone();
    return copy;
  }
};

const at::Generator& default_generator(c10::DeviceIndex index) {
  static std::vector<at::Generator> found = [] {
    std::vector<at::Generator> made;
    for (c10::DeviceIndex i = 0; i < num_devices(); i++) made.push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return found.at(index < 0 ? current : index);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return num_devices(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = index; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return std::exchange(current, index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return index < 0 ? current : std::exchange(current, index); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard lock(pinned_mutex);
    return pinned.count(data) > 0;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return at::make_generator<Generator>(index < 0 ? current : index); }
  at::Device getDeviceFromPtr(void*) const override { return {KIND, current}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto data = memory.allocate(bytes);
    if (storage.nbytes() && bytes) std::memcpy(data.get(), storage.data(), std::min(storage.nbytes(), bytes));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

using Sizes = c10::IntArrayRef;

at::Tensor empty(Sizes size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout, std::optional<at::Device> device,
                 std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "only memory of the CPU can be pinned");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(Sizes size, Sizes stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                         std::optional<at::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "only memory of the CPU can be pinned");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// A tensor of the CPU on the same memory.
at::Tensor seen(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  auto out = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {},
                           at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
  if (tensor.is_conj()) out._set_conj(true);
  if (tensor.is_neg()) out._set_neg(true);
  return out;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  seen(to).copy_(seen(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Tensor on_device(const at::Tensor& tensor) { return tensor.defined() ? tensor.to(c10::Device(KIND, current)) : tensor; }
std::optional<at::Tensor> seen_if_given(const std::optional<at::Tensor>& tensor) {
  return tensor && tensor->defined() ? std::optional<at::Tensor>(seen(*tensor)) : std::nullopt;
}

at::Scalar local_scalar(const at::Tensor& tensor) { return at::native::_local_scalar_dense_cpu(seen(tensor)); }
at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, std::move(offset));
}
const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}
at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
at::Tensor view_as_real(const at::Tensor& self) { return at::native::view_as_real(self); }
at::Tensor view_as_complex(const at::Tensor& self) { return at::native::view_as_complex(self); }
at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) { return at::native::unfold(self, dim, size, step); }
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) { return at::native::set_tensor_(self, source); }
at::Tensor& set_storage(at::Tensor& self, at::Storage source) { return at::native::set_(self, source); }
at::Tensor& set_all(at::Tensor& self, at::Storage source, int64_t offset, Sizes size, Sizes stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}
int64_t attention_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;  // the composite one
}

// It changes its running statistics, though its signature does not say so: a copy of them would stay unchanged.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                                                          const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& mean,
                                                          const std::optional<at::Tensor>& variance, bool training, double momentum, double eps) {
  const auto [y, saved_mean, saved_scale] = at::native_batch_norm(seen(input), seen_if_given(weight), seen_if_given(bias), seen_if_given(mean),
                                                                  seen_if_given(variance), training, momentum, eps);
  return {on_device(y), on_device(saved_mean), on_device(saved_scale)};
}

std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  return at::native::native_dropout_cpu(input, p, train);  // which draws by another operation, of the device
}

void record_stream(at::Tensor&, at::Stream) {}  // memory is never reused before its work is done

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
                       c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
                       c10::SymInt groups) {
  return on_device(at::convolution_symint(seen(input), seen(weight), seen_if_given(bias), stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
                                                                    c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                                                                    c10::SymIntArrayRef dilation, bool transposed,
                                                                    c10::SymIntArrayRef output_padding, c10::SymInt groups,
                                                                    std::array<bool, 3> wanted) {
  const std::vector<c10::SymInt> outputs{transposed ? weight.sym_size(1) * groups : weight.sym_size(0)};
  const auto [dx, dw, db] = at::convolution_backward_symint(seen(grad), seen(input), seen(weight), c10::SymIntArrayRef(outputs), stride, padding,
                                                            dilation, transposed, output_padding, groups, wanted);
  return {on_device(dx), on_device(dw), on_device(db)};
}

// Draws from the device's generator where a call names none.
void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto begin = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); i++) {
    if (arguments[i].name() != "generator") continue;
    auto& value = (*stack)[begin + i];
    const auto given = value.isNone() ? default_generator(-1) : value.toGenerator();
    TORCH_CHECK(given.device().type() == KIND, "Expected a generator of this device but found one of ", given.device());
    value = static_cast<Generator*>(given.unsafeGetGeneratorImpl())->inner;
  }
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_all);
  m.impl("view", view);
  m.impl("view_as_real", view_as_real);
  m.impl("view_as_complex", view_as_complex);
  m.impl("unfold", unfold);
  m.impl("_fused_sdp_choice", attention_choice);
  m.impl("native_batch_norm", batch_norm);
  m.impl("native_dropout", dropout);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

// Without these, a copy of a lazy conjugate would be resolved by a copy, without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_SET_OPT_DTYPE)
  AT_FORALL_PROMOTE(PROMOTE)
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

// Collectives of the device, which gloo does on the same memory.
struct Bridge final : c10d::Backend {
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<Tensors>;
  using Work = c10::intrusive_ptr<c10d::Work>;
  c10::intrusive_ptr<c10d::Backend> gloo;

  explicit Bridge(c10::intrusive_ptr<c10d::Backend> given) : Backend(given->getRank(), given->getSize()), gloo(std::move(given)) {}
  static Tensors on_cpu(const Tensors& tensors) {
    Tensors found;
    for (const auto& tensor : tensors) found.push_back(seen(tensor));
    return found;
  }
  static Lists on_cpu(const Lists& lists) {
    Lists found;
    for (const auto& list : lists) found.push_back(on_cpu(list));
    return found;
  }
  const std::string getBackendName() const override { return "bridge"; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void abort() override { gloo->abort(); }
  void shutdown() override { gloo->shutdown(); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo->getBackendOptions(); }

  Work broadcast(Tensors& a, const c10d::BroadcastOptions& o) override { auto x = on_cpu(a); return gloo->broadcast(x, o); }
  Work allreduce(Tensors& a, const c10d::AllreduceOptions& o) override { auto x = on_cpu(a); return gloo->allreduce(x, o); }
  Work allreduce_coalesced(Tensors& a, const c10d::AllreduceCoalescedOptions& o) override { auto x = on_cpu(a); return gloo->allreduce_coalesced(x, o); }
  Work reduce(Tensors& a, const c10d::ReduceOptions& o) override { auto x = on_cpu(a); return gloo->reduce(x, o); }
  Work allgather(Lists& a, Tensors& b, const c10d::AllgatherOptions& o) override { auto x = on_cpu(a); auto y = on_cpu(b); return gloo->allgather(x, y, o); }
  Work _allgather_base(at::Tensor& a, at::Tensor& b, const c10d::AllgatherOptions& o) override { auto x = seen(a), y = seen(b); return gloo->_allgather_base(x, y, o); }
  Work allgather_into_tensor_coalesced(Tensors& a, Tensors& b, const c10d::AllgatherOptions& o) override { auto x = on_cpu(a), y = on_cpu(b); return gloo->allgather_into_tensor_coalesced(x, y, o); }
  Work gather(Lists& a, Tensors& b, const c10d::GatherOptions& o) override { auto x = on_cpu(a); auto y = on_cpu(b); return gloo->gather(x, y, o); }
  Work scatter(Tensors& a, Lists& b, const c10d::ScatterOptions& o) override { auto x = on_cpu(a); auto y = on_cpu(b); return gloo->scatter(x, y, o); }
  Work reduce_scatter(Tensors& a, Lists& b, const c10d::ReduceScatterOptions& o) override { auto x = on_cpu(a); auto y = on_cpu(b); return gloo->reduce_scatter(x, y, o); }
  Work _reduce_scatter_base(at::Tensor& a, at::Tensor& b, const c10d::ReduceScatterOptions& o) override { auto x = seen(a), y = seen(b); return gloo->_reduce_scatter_base(x, y, o); }
  Work reduce_scatter_tensor_coalesced(Tensors& a, Tensors& b, const c10d::ReduceScatterOptions& o) override { auto x = on_cpu(a), y = on_cpu(b); return gloo->reduce_scatter_tensor_coalesced(x, y, o); }
  Work alltoall_base(at::Tensor& a, at::Tensor& b, std::vector<int64_t>& c, std::vector<int64_t>& d, const c10d::AllToAllOptions& o) override { auto x = seen(a), y = seen(b); return gloo->alltoall_base(x, y, c, d, o); }
  Work alltoall(Tensors& a, Tensors& b, const c10d::AllToAllOptions& o) override { auto x = on_cpu(a), y = on_cpu(b); return gloo->alltoall(x, y, o); }
  Work send(Tensors& a, int to, int tag) override { auto x = on_cpu(a); return gloo->send(x, to, tag); }
  Work recv(Tensors& a, int from, int tag) override { auto x = on_cpu(a); return gloo->recv(x, from, tag); }
  Work recvAnysource(Tensors& a, int tag) override { auto x = on_cpu(a); return gloo->recvAnysource(x, tag); }
  Work barrier(const c10d::BarrierOptions&) override { return gloo->barrier(c10d::BarrierOptions()); }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("device_count", [] { return num_devices(); });
  m.def("current_device", [] { return current; });
  m.def("set_device", [](int index) { current = index; });
  m.def("bridge", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> { return c10::make_intrusive<Bridge>(std::move(gloo)); });
  m.def("default_generator", [](int index) { return default_generator(index); });
}
