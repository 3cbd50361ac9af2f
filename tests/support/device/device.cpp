// A device on the host: PrivateUse1 with an allocator, streams, events, a generator and pinned memory of its own.
//
// Every operation is done by the CPU's kernels. What matters is what it notes: each place where a CUDA device would make the host wait.
// It does as CUDA does: a copy between pinned memory and the device that is not blocking arrives only when the host synchronizes with an
// event, a stream or the device; until then its target has NaN. Tensors of the host and the device do not mix.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>

using at::Tensor;
constexpr auto kDevice = c10::DeviceType::PrivateUse1;

// What is noted

static PyObject* callback = nullptr;
static thread_local int depth = 0;
static std::atomic<uint64_t> operations{0};

static void note(const char* what, const std::string& detail = "") {
  if (!callback || depth) return;
  pybind11::gil_scoped_acquire gil;
  pybind11::handle handle(callback);
  handle(pybind11::str(what), pybind11::str(detail));
}

struct Inside {  // of an operation: what it does itself is the device's work
  Inside() { ++depth; }
  ~Inside() { --depth; }
};

// Memory

static std::atomic<int64_t> allocated{0}, limit{0};
static std::mutex sizes_lock;
static std::map<void*, size_t> sizes;

static void free_device(void* p) {
  std::lock_guard<std::mutex> guard(sizes_lock);
  auto found = sizes.find(p);
  if (found != sizes.end()) {
    allocated -= static_cast<int64_t>(found->second);
    sizes.erase(found);
  }
  c10::free_cpu(p);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    if (limit && allocated + static_cast<int64_t>(n) > limit) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, "simulated device: out of memory. Tried to allocate ", n, " bytes");
    }
    void* p = c10::alloc_cpu(n);
    if (p) {
      std::lock_guard<std::mutex> guard(sizes_lock);
      sizes[p] = n;
      allocated += static_cast<int64_t>(n);
    }
    return {p, p, &free_device, c10::Device(kDevice, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* d, const void* s, std::size_t n) const override { default_copy_data(d, s, n); }
};
static DeviceAllocator allocator;
REGISTER_ALLOCATOR(kDevice, &allocator);

static std::mutex pinned_lock;
static std::map<const char*, size_t> pinned;

static void free_pinned(void* p) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  pinned.erase(static_cast<const char*>(p));
  c10::free_cpu(p);
}

static bool is_pinned(const void* p) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  auto next = pinned.upper_bound(static_cast<const char*>(p));
  if (next == pinned.begin()) return false;
  auto block = std::prev(next);
  return static_cast<const char*>(p) < block->first + block->second;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* p = c10::alloc_cpu(n);
    if (p) {
      std::lock_guard<std::mutex> guard(pinned_lock);
      pinned[static_cast<const char*>(p)] = n;
    }
    return {p, p, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* d, const void* s, std::size_t n) const override { default_copy_data(d, s, n); }
};
static PinnedAllocator pinned_allocator;

// Streams and events

static std::mutex arrivals_lock;
static std::vector<std::pair<Tensor, Tensor>> arrivals;  // targets in pinned memory, and what arrives there

// With collectives as those of nccl, the host does not wait for one: the next operation on the device does, as its kernel would.
static std::atomic<bool> collectives_return_at_once{false};
static std::mutex queue_lock;
static std::vector<c10::intrusive_ptr<c10d::Work>> queued;

static void queue(c10::intrusive_ptr<c10d::Work> work) {
  std::lock_guard<std::mutex> guard(queue_lock);
  queued.push_back(std::move(work));
}

static void finish_queued() {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  {
    std::lock_guard<std::mutex> guard(queue_lock);
    works = queued;
  }
  for (auto& work : works) work->wait();
  std::lock_guard<std::mutex> guard(queue_lock);
  queued.erase(queued.begin(), queued.begin() + std::min(works.size(), queued.size()));
}

static bool has_queued() {
  std::lock_guard<std::mutex> guard(queue_lock);
  for (auto& work : queued)
    if (!work->isCompleted()) return true;
  return false;
}

static void arrive() {
  finish_queued();
  std::vector<std::pair<Tensor, Tensor>> now;
  {
    std::lock_guard<std::mutex> guard(arrivals_lock);
    now.swap(arrivals);
  }
  Inside inside;
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  for (auto& [target, value] : now) target.copy_(value);
}

struct Recorded {
  uint64_t operation = 0;
};

static thread_local c10::StreamId current_stream = 0;
static std::atomic<c10::StreamId> streams{0};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device device() { return {kDevice, 0}; }
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }
  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(++streams); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(++streams); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = stream(current_stream);
    current_stream = next.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override { return !has_queued(); }
  void synchronizeStream(const c10::Stream&) const override {
    note("synchronize a stream");
    arrive();
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    note("synchronize the device");
    arrive();
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Recorded;
    static_cast<Recorded*>(*event)->operation = operations;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    arrive();
    return true;
  }
  void synchronizeEvent(void* event) const override {
    // The host waits for what was queued before the event. Where much was queued since, the device goes on meanwhile.
    if (event) note("synchronize an event", std::to_string(operations - static_cast<Recorded*>(event)->operation));
    arrive();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Recorded*>(event); }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
};
namespace c10::impl {
C10_REGISTER_GUARD_IMPL(PrivateUse1, ::Guard);
}

// Random numbers: the CPU's generator with another state

struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex index = 0)
      : c10::GeneratorImpl(c10::Device(kDevice, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  static c10::DeviceType device_type() { return kDevice; }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->inner = inner.clone();
    return copy;
  }
  at::Generator inner;
};

static bool shares_noise = false;

static at::Generator& default_generator() {
  static at::Generator made = at::make_generator<Generator>();
  return made;
}

class Swapped {  // the CPU's default generator has the state of the device's, which it gives back
 public:
  explicit Swapped(at::Generator own) : own_(std::move(own)), host_(at::detail::getDefaultCPUGenerator()) {
    before_ = host_.get_state();
    host_.set_state(own_.get_state());
  }
  ~Swapped() {
    own_.set_state(host_.get_state());
    host_.set_state(before_);
  }

 private:
  at::Generator own_, host_;
  Tensor before_;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto data = allocator.allocate(size);
    if (storage.data()) memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(size);
  }
};

// Operations

static Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<c10::Device>,
                    std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}

static Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                            std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
}

static Tensor on_cpu(const Tensor& x) {  // the same memory as a tensor of the CPU
  if (x.device().is_cpu()) return x;
  auto base = x.storage();
  auto length = static_cast<int64_t>(base.nbytes() / x.element_size());
  // It keeps the memory.
  auto flat = at::from_blob(const_cast<void*>(base.data()), {length}, [base](void*) {}, x.options().device(at::kCPU));
  return flat.as_strided(x.sizes(), x.strides(), x.storage_offset());
}

static Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  finish_queued();
  const bool crosses = self.device() != target.device();
  const bool to_device = crosses && self.device().is_cpu();
  const Tensor& host = to_device ? self : target;
  const bool waits = crosses && !(non_blocking && is_pinned(host.const_data_ptr())) && target.numel();
  ++operations;
  if (waits) {
    note(to_device ? "copy to the device" : "copy to the host", non_blocking ? "not pinned" : "blocking");
    arrive();
  }
  Inside inside;
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  if (!target.numel()) return target;
  if (crosses && !to_device && !waits) {
    auto later = target.detach();
    auto value = on_cpu(self).expand_as(target).to(target.scalar_type(), false, true).clone();
    if (target.is_non_overlapping_and_dense()) memset(target.mutable_data_ptr(), 0xFF, target.nbytes());
    std::lock_guard<std::mutex> guard(arrivals_lock);
    arrivals.emplace_back(later, value);
    return target;
  }
  on_cpu(target).copy_(on_cpu(self));
  return target;
}

static Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  Inside inside;
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  if (target.sizes() != self.sizes()) target.resize_(self.sizes());
  if (target.numel()) on_cpu(target).copy_(on_cpu(self));
  return target;
}

static at::Scalar read_number(const Tensor& x) {
  note("read a number");
  arrive();
  Inside inside;
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  return at::_local_scalar_dense(on_cpu(x));
}

static Tensor as_strided(const Tensor& x, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::cpu::as_strided(x, size, stride, offset);
}
static Tensor view(const Tensor& x, c10::IntArrayRef size) { return at::native::view(x, size); }
static Tensor view_dtype(const Tensor& x, at::ScalarType dtype) { return at::native::view_dtype(x, dtype); }
static Tensor reshape_alias(const Tensor& x, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(x, size, stride);
}
static Tensor unfold(const Tensor& x, int64_t d, int64_t size, int64_t step) { return at::native::unfold(x, d, size, step); }
static const Tensor& resize(const Tensor& x, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  return at::native::resize_(x, C10_AS_INTARRAYREF_SLOW(size), format);
}
static Tensor& set_storage(Tensor& x, c10::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::cpu::set_(x, std::move(storage), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

// Those whose result has a size that the host must know, and those that look at it.
static const std::set<std::string> kWaiting = {
    "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::unique_dim_consecutive", "aten::bincount", "aten::equal", "aten::repeat_interleave", "aten::histc", "aten::_ctc_loss",
    "aten::linalg_eig", "aten::binomial"};
static const std::set<std::string> kIndexing = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_", "aten::index_put.out"};

static bool is_on_device(const Tensor& x) { return x.defined() && x.device().type() == kDevice; }

template <typename F>
static void each_tensor(const torch::jit::Stack& stack, size_t count, F look) {
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    const auto& value = stack[i];
    if (value.isTensor()) {
      look(value.toTensor());
    } else if (value.isTensorList()) {
      for (const Tensor& each : value.toTensorVector()) look(each);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<Tensor>& each : value.toOptionalTensorVector())
        if (each) look(*each);
    }
  }
}

static void look_at(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& name = op.schema().name();
  const size_t count = op.schema().arguments().size();
  if (kWaiting.count(name)) note("an operation that waits", name);
  if (kIndexing.count(name)) {
    const auto& indices = stack[stack.size() - count + 1];
    if (indices.isOptionalTensorList())
      for (const std::optional<Tensor>& index : indices.toOptionalTensorVector()) {
        if (!index || !index->defined()) continue;
        if (index->device().is_cpu()) note("copy to the device", "an index");
        if (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte) note("an operation that waits", name + " by a mask");
      }
    return;
  }
  bool is_mixed = false, is_tensor = false, is_here = false;
  each_tensor(stack, count, [&](const Tensor& x) {
    if (!x.defined()) return;
    is_here |= is_on_device(x);
    if (x.device().is_cpu()) (x.dim() ? is_tensor : is_mixed) = true;
  });
  if (!is_here) return;
  const bool takes_scalars = op.hasTag(at::Tag::pointwise) || name.rfind("aten::_foreach_", 0) == 0 || name.rfind("aten::masked_fill", 0) == 0;
  const bool takes_any = name.rfind("aten::_foreach_copy", 0) == 0 || name == "aten::set_";
  TORCH_CHECK((!is_tensor || takes_any) && (!is_mixed || takes_any || takes_scalars),
              "Expected all tensors to be on the same device. Received: tensors of the host and of the device in ", name);
  // It copies what is a tensor of the host, such as the 0.0 in `torch.where(condition, x, 0.0)`.
  if (name == "aten::where" && is_mixed) note("copy to the device", name);
  if (name.rfind("aten::_foreach_copy", 0) == 0 && (is_tensor || is_mixed)) note("copy", name);
  if (name.rfind("aten::masked_fill", 0) == 0) {
    const auto& value = stack.back();
    if (value.isTensor() && is_on_device(value.toTensor())) note("read a number", name);
  }
}

static void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  finish_queued();
  ++operations;
  look_at(op, *stack);
  Inside inside;
  std::optional<Swapped> swapped;
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    at::Generator own = default_generator();
    for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i) {
      auto& value = (*stack)[i];
      if (!value.isGenerator()) continue;
      auto given = value.toGenerator();
      if (!given.defined()) continue;
      TORCH_CHECK(given.device().type() == kDevice, "Expected a generator of the device. Received: one of ", given.device());
      own = given;
      value = c10::IValue();
      swapped.emplace(own);
    }
    if (!swapped && !shares_noise) swapped.emplace(own);
  }
  at::native::cpu_fallback(op, stack, /*error_on_views=*/false);
}

// The operator of convolutions has no kernel of the CPU under the name that it has for a device.
static Tensor moved(const Tensor& x) { return x.defined() ? at::empty_like(x, x.options().device(Guard::device())).copy_(x) : x; }

static Tensor convolution(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b, c10::IntArrayRef stride, c10::IntArrayRef padding,
                          c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding, int64_t groups) {
  ++operations;
  Inside inside;
  std::optional<Tensor> bias;
  if (b && b->defined()) bias = on_cpu(*b);
  return moved(at::convolution(on_cpu(x), on_cpu(w), bias, stride, padding, dilation, transposed, output_padding, groups));
}

static std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& g, const Tensor& x, const Tensor& w, c10::IntArrayRef stride,
                                                               c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                                                               c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  ++operations;
  Inside inside;
  const int64_t channels = transposed ? w.size(1) * groups : w.size(0);
  auto [gx, gw, gb] = at::convolution_backward(on_cpu(g), on_cpu(x), on_cpu(w), c10::IntArrayRef(channels), stride, padding, dilation,
                                               transposed, output_padding, groups, mask);
  return {moved(gx), moved(gw), moved(gb)};
}

// It changes the running statistics, which its schema does not say.
static std::tuple<Tensor, Tensor, Tensor> batch_norm(const Tensor& x, const std::optional<Tensor>& w, const std::optional<Tensor>& b,
                                                     const std::optional<Tensor>& mean, const std::optional<Tensor>& variance, bool training,
                                                     double momentum, double eps) {
  ++operations;
  Inside inside;
  auto own = [](const std::optional<Tensor>& t) { return t && t->defined() ? std::optional<Tensor>(on_cpu(*t)) : std::nullopt; };
  auto [y, m, v] = at::native_batch_norm(on_cpu(x), own(w), own(b), own(mean), own(variance), training, momentum, eps);
  return {moved(y), moved(m), moved(v)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  // Otherwise they are made of others, which round in another order.
  for (const char* name : {"native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("native_batch_norm", batch_norm);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", read_number);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("view.dtype", view_dtype);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
}

#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define WIDER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(WIDER)
}

// The kernel of attention that the CPU takes.
static int64_t choose_attention(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double dropout,
                                bool is_causal, std::optional<double> scale, bool enable_gqa) {
  Inside inside;
  std::optional<Tensor> own;
  if (mask && mask->defined()) own = on_cpu(*mask);
  return at::_fused_sdp_choice(on_cpu(q), on_cpu(k), on_cpu(v), own, dropout, is_causal, scale, enable_gqa);
}
namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose_attention)
}

// Collectives: those of a backend of the CPU on the same memory

struct Arrival final : c10d::Work {
  Arrival(c10::intrusive_ptr<c10d::Work> inner, std::vector<Tensor> results) : inner_(std::move(inner)), results_(std::move(results)) {}
  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<Tensor> result() override { return results_; }
  void synchronize() override { inner_->synchronize(); }
  bool wait(std::chrono::milliseconds timeout) override {
    if (!collectives_return_at_once) return inner_->wait(timeout);
    queue(inner_);
    return true;
  }
  void abort() override { inner_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto results = results_;
    if (collectives_return_at_once) {
      queue(inner_);
      auto done = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
      done->markCompleted(c10::IValue(results));
      return done;
    }
    return inner_->getFuture()->then([results](c10::ivalue::Future& done) {
      if (done.hasError()) std::rethrow_exception(done.exception_ptr());
      return c10::IValue(results);
    }, c10::ListType::ofTensors());
  }

 private:
  c10::intrusive_ptr<c10d::Work> inner_;
  std::vector<Tensor> results_;
};

static std::vector<Tensor> all_on_cpu(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> found;
  for (const auto& each : tensors) found.push_back(on_cpu(each));
  return found;
}

static std::vector<std::vector<Tensor>> all_on_cpu(const std::vector<std::vector<Tensor>>& lists) {
  std::vector<std::vector<Tensor>> found;
  for (const auto& each : lists) found.push_back(all_on_cpu(each));
  return found;
}

struct Collectives final : c10d::Backend {
  explicit Collectives(c10::intrusive_ptr<c10d::Backend> inner) : c10d::Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}
  const std::string getBackendName() const override { return "simulated"; }
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  template <typename R>
  static WorkPtr after(WorkPtr work, const R& results) {
    ++operations;
    if constexpr (std::is_same_v<R, std::vector<std::vector<Tensor>>>)
      return c10::make_intrusive<Arrival>(std::move(work), results.empty() ? std::vector<Tensor>() : results[0]);
    else
      return c10::make_intrusive<Arrival>(std::move(work), results);
  }
  WorkPtr broadcast(std::vector<Tensor>& t, const c10d::BroadcastOptions& o) override {
    auto own = all_on_cpu(t);
    return after(inner_->broadcast(own, o), t);
  }
  WorkPtr allreduce(std::vector<Tensor>& t, const c10d::AllreduceOptions& o) override {
    auto own = all_on_cpu(t);
    return after(inner_->allreduce(own, o), t);
  }
  WorkPtr allreduce_coalesced(std::vector<Tensor>& t, const c10d::AllreduceCoalescedOptions& o) override {
    auto own = all_on_cpu(t);
    return after(inner_->allreduce_coalesced(own, o), t);
  }
  WorkPtr reduce(std::vector<Tensor>& t, const c10d::ReduceOptions& o) override {
    auto own = all_on_cpu(t);
    return after(inner_->reduce(own, o), t);
  }
  WorkPtr allgather(std::vector<std::vector<Tensor>>& out, std::vector<Tensor>& in, const c10d::AllgatherOptions& o) override {
    auto outs = all_on_cpu(out);
    auto ins = all_on_cpu(in);
    return after(inner_->allgather(outs, ins, o), out);
  }
  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    auto outs = on_cpu(out), ins = on_cpu(in);
    return after(inner_->_allgather_base(outs, ins, o), std::vector<Tensor>{out});
  }
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override {
    auto outs = on_cpu(out), ins = on_cpu(in);
    return after(inner_->_reduce_scatter_base(outs, ins, o), std::vector<Tensor>{out});
  }
  WorkPtr alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& a, std::vector<int64_t>& b, const c10d::AllToAllOptions& o) override {
    auto outs = on_cpu(out), ins = on_cpu(in);
    return after(inner_->alltoall_base(outs, ins, a, b, o), std::vector<Tensor>{out});
  }
  WorkPtr gather(std::vector<std::vector<Tensor>>& out, std::vector<Tensor>& in, const c10d::GatherOptions& o) override {
    auto outs = all_on_cpu(out);
    auto ins = all_on_cpu(in);
    return after(inner_->gather(outs, ins, o), out);
  }
  WorkPtr scatter(std::vector<Tensor>& out, std::vector<std::vector<Tensor>>& in, const c10d::ScatterOptions& o) override {
    auto outs = all_on_cpu(out);
    auto ins = all_on_cpu(in);
    return after(inner_->scatter(outs, ins, o), out);
  }
  WorkPtr send(std::vector<Tensor>& t, int rank, int tag) override {
    auto own = all_on_cpu(t);
    return after(inner_->send(own, rank, tag), t);
  }
  WorkPtr recv(std::vector<Tensor>& t, int rank, int tag) override {
    auto own = all_on_cpu(t);
    return after(inner_->recv(own, rank, tag), t);
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override { return inner_->barrier(o); }

 private:
  c10::intrusive_ptr<c10d::Backend> inner_;
};

// Autograd starts its threads for devices at the first backward of a process, and a fork keeps that it has.
struct Engine : torch::autograd::Engine {
  static void start() {
    pybind11::gil_scoped_release no_gil;
    static_cast<Engine&>(torch::autograd::Engine::get_default_engine()).start_device_threads();
  }
};

PYBIND11_MODULE(simulated_device, m) {
  m.def("start", [] {
    static Hooks hooks;
    at::RegisterPrivateUse1HooksInterface(&hooks);
    Engine::start();
  });
  m.def("listen", [](const pybind11::object& f) {
    Py_XDECREF(callback);
    callback = f.is_none() ? nullptr : pybind11::object(f).release().ptr();
  });
  m.def("operations", [] { return operations.load(); });
  m.def("allocated", [] { return allocated.load(); });
  m.def("set_limit", [](int64_t bytes) { limit = bytes; });
  m.def("share_noise", [](bool shares) { shares_noise = shares; });
  m.def("return_collectives_at_once", [](bool at_once) { collectives_return_at_once = at_once; });
  m.def("default_generator", [] { return default_generator(); });
  m.def("collectives", [](c10::intrusive_ptr<c10d::Backend> inner) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Collectives>(std::move(inner));
  });
}
