// A pretended accelerator: a backend of torch whose tensors lie in the host's memory and are computed by the CPU's
// kernels, and which behaves towards the host as a GPU does:
//
//   - An operation on tensors of the device and of the host raises, but for what CUDA allows: tensors without dimensions,
//     and indices on the host, which are uploaded.
//   - Random numbers come from the device's own generators.
//   - Each copy between the host and the device is reported with its bytes, and each wait of the host.
//   - Pinned memory that is written before the host has waited for a copy out of it raises at that wait.
//
// Almost every operation takes one path: `run_on_host` hands the memory of its arguments to the CPU's kernel as tensors
// of the host, and takes the memory of the results as tensors of the device. Nothing is copied.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <set>
#include <vector>

using at::Tensor;
using c10::IValue;

namespace {

constexpr auto PRETENDED = c10::DeviceType::PrivateUse1;
const c10::Device THE_DEVICE(PRETENDED, 0);

// ---- What is reported ----------------------------------------------------------------------------------------------

enum class Event { WAIT, UPLOAD, DOWNLOAD };

py::object* listener = nullptr;  // called with (event, operation, bytes); leaked, as Python may be gone at the end

void report(Event event, const std::string& operation, int64_t bytes) {
  if (listener == nullptr) return;
  py::gil_scoped_acquire gil;
  const char* names[] = {"wait", "upload", "download"};
  (*listener)(names[static_cast<int>(event)], operation, bytes);
}

// ---- Memory --------------------------------------------------------------------------------------------------------

struct Memory final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(bytes ? bytes : 1);
    return {data, data, &c10::free_cpu, THE_DEVICE};
  }
  at::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;

std::mutex pinned_lock;
std::map<const char*, size_t> pinned;  // the bytes of each piece of pinned memory by its address

void free_pinned(void* data) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  pinned.erase(static_cast<const char*>(data));
  c10::free_cpu(data);
}

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  auto after = pinned.upper_bound(static_cast<const char*>(data));
  if (after == pinned.begin()) return false;
  auto [start, bytes] = *std::prev(after);
  return static_cast<const char*>(data) < start + bytes;
}

struct PinnedMemory final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(bytes ? bytes : 1);
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned[static_cast<const char*>(data)] = bytes ? bytes : 1;
    return {data, data, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
PinnedMemory pinned_memory;

// ---- Random numbers ------------------------------------------------------------------------------------------------

// A generator of the device, whose numbers are those of a generator of the host.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(at::Generator host)
      : GeneratorImpl(THE_DEVICE, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), host(std::move(host)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(host.clone()); }
  at::Generator host;
};

at::Generator new_generator() { return at::make_generator<Generator>(at::detail::createCPUGenerator()); }

const at::Generator& default_generator() {
  static at::Generator generator = new_generator();
  return generator;
}

// ---- What torch asks of a backend ----------------------------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return new_generator(); }
  at::Device getDeviceFromPtr(void*) const override { return THE_DEVICE; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
};
Hooks hooks;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<PRETENDED> {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::Device getDevice() const override { return THE_DEVICE; }
  c10::Device exchangeDevice(c10::Device) const override { return THE_DEVICE; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, THE_DEVICE); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, THE_DEVICE); }
};

bool on_device(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == PRETENDED; }

// The same memory as a tensor of the host. An empty tensor gets its own, so that an `out=` argument may grow.
Tensor as_host(const Tensor& tensor) {
  if (!on_device(tensor)) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  auto keep = [storage = tensor.storage()](void*) {};
  void* data = const_cast<void*>(tensor.const_data_ptr());
  return at::from_blob(data, tensor.sizes(), tensor.strides(), std::move(keep), options);
}

// The memory of a new tensor of the host as a tensor of the device.
Tensor as_device(const Tensor& host) {
  auto held = new c10::Storage(host.storage());
  auto release = [](void* context) { delete static_cast<c10::Storage*>(context); };
  at::DataPtr data(held->mutable_data(), held, release, THE_DEVICE);
  c10::Storage storage(c10::Storage::use_byte_size_t(), held->nbytes(), std::move(data), &memory, true);
  auto key = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  Tensor result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), key, host.dtype());
  result.unsafeGetTensorImpl()->set_storage_offset(host.storage_offset());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
  return result;
}

// ---- Waits and copies ----------------------------------------------------------------------------------------------

struct Copying {
  Tensor from;                // in pinned memory
  std::vector<char> content;  // at the time of the copy
};
std::mutex copying_lock;
std::vector<Copying> copying;  // since the host waited last

std::vector<char> content_of(const Tensor& tensor) {
  Tensor whole = tensor.contiguous();
  auto data = static_cast<const char*>(whole.const_data_ptr());
  return {data, data + whole.nbytes()};
}

void wait(const std::string& operation) {
  std::vector<Copying> done;
  {
    std::lock_guard<std::mutex> guard(copying_lock);
    done.swap(copying);
  }
  report(Event::WAIT, operation, 0);
  for (const auto& copy : done)
    TORCH_CHECK(content_of(copy.from) == copy.content,
                "pinned memory was written while a copy out of it may have been under way");
}

void upload(const std::string& operation, const Tensor& host, bool blocks) {
  report(Event::UPLOAD, operation, host.nbytes());
  if (blocks) {
    wait(operation);
  } else if (is_pinned(host.const_data_ptr())) {
    std::lock_guard<std::mutex> guard(copying_lock);
    copying.push_back({host, content_of(host)});
  }
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (from.numel() > 0 && !on_device(from)) upload("copy to the device", from, !non_blocking);
  if (from.numel() > 0 && !on_device(to)) {
    report(Event::DOWNLOAD, "copy to the host", from.nbytes());
    wait("copy to the host");  // even if it need not block: pageable memory cannot be written otherwise
  }
  as_host(to).copy_(as_host(from));
  return to;
}

at::Scalar item(const Tensor& tensor) {
  report(Event::DOWNLOAD, "item", tensor.nbytes());
  wait("item");
  return as_host(tensor).item();
}

// ---- Operations that make tensors or look at memory otherwise ------------------------------------------------------

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  auto key = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, key, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  auto key = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory, key,
                                           c10::dtype_or_default(dtype));
}

const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), C10_AS_INTARRAYREF_SLOW(size), std::nullopt);
  return self;
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  auto start = offset ? std::make_optional(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor& set_storage(Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                    c10::SymIntArrayRef stride) {
  auto impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.expect_int());
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  std::vector<c10::SymInt> sizes = {static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize())}, strides = {1};
  return set_storage(self, std::move(storage), 0, sizes, strides);
}

// ---- Operations that the CPU has under another name, or not at all -------------------------------------------------

int64_t attention_by_products(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                              std::optional<double>, bool) {
  return 0;  // scaled_dot_product_attention by matrix products and a softmax, which run here one by one
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                   bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  std::optional<Tensor> host_bias;
  if (bias) host_bias = as_host(*bias);
  bool mixed = !on_device(input) || !on_device(weight) || (bias && bias->defined() && !on_device(*bias));
  TORCH_CHECK(!mixed, "convolution: Expected all tensors to be on the same device");
  return as_device(at::convolution(as_host(input), as_host(weight), host_bias, C10_AS_INTARRAYREF_SLOW(stride),
                                   C10_AS_INTARRAYREF_SLOW(padding), C10_AS_INTARRAYREF_SLOW(dilation), transposed,
                                   C10_AS_INTARRAYREF_SLOW(output_padding), groups.expect_int()));
}

// CUDA counts integers too, and models count tokens for their experts so.
Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  Tensor values = as_host(self);
  if (!c10::isIntegralType(values.scalar_type(), false)) return as_device(at::histc(values, bins, low, high));
  return as_device(at::histc(values.to(at::kDouble), bins, low, high).to(values.scalar_type()));
}

// ---- All other operations ------------------------------------------------------------------------------------------

// The shape of the result depends on values, which the host has to know.
const std::set<std::string> WAITING = {
    "aten::nonzero",    "aten::masked_select",      "aten::equal",      "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave.Tensor",
};
// Their indices may be on the host.
const std::set<std::string> INDEXING = {"aten::index.Tensor", "aten::index.Tensor_out", "aten::_index_put_impl_"};

struct Arguments {
  const std::string& name;
  std::vector<std::pair<Tensor, Tensor>> tensors;  // of the device, and what stands for each on the host
  std::string shapes_on_host;
  bool any_on_device = false;

  void look_at(const Tensor& tensor) {
    if (on_device(tensor)) {
      any_on_device = true;
    } else if (tensor.defined() && tensor.dim() > 0) {
      for (auto size : tensor.sizes()) shapes_on_host += std::to_string(size) + " ";
      shapes_on_host += "| ";
    }
  }
  void look_at_index(const Tensor& index, bool device_indexed) {
    TORCH_CHECK(!on_device(index) || device_indexed,
                "indices should be either on cpu or on the same device as the indexed tensor (cpu)");
    if (!index.defined()) return;
    if (!on_device(index) && index.numel() > 0) upload(name + " with an index on the host", index, true);
    if (on_device(index) && index.scalar_type() == at::kBool) wait(name + " with a mask");
  }
  Tensor stand_in(const Tensor& tensor) {
    if (!on_device(tensor)) return tensor;
    for (auto& [ours, host] : tensors)
      if (ours.is_same(tensor)) return host;
    tensors.emplace_back(tensor, as_host(tensor));
    return tensors.back().second;
  }
};

at::Generator generator_of(const std::optional<at::Generator>& asked) {
  const auto& generator = asked && asked->defined() ? *asked : default_generator();
  TORCH_CHECK(generator.device().type() == PRETENDED, "Expected a '", THE_DEVICE.type(),
              "' device type for generator but found '", generator.device().type(), "'");
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->host;
}

Tensor result_on_device(const Tensor& host, const Arguments& arguments) {
  if (!host.defined() || on_device(host)) return host;
  for (const auto& [ours, stand_in] : arguments.tensors) {
    if (!host.is_same(stand_in)) continue;
    if (!ours.sizes().equals(host.sizes())) {  // an `out=` argument that grew
      at::native::resize_impl_cpu_(ours.unsafeGetTensorImpl(), host.sizes(), std::nullopt);
      as_host(ours).copy_(host);
    }
    return ours;
  }
  for (const auto& [ours, _] : arguments.tensors) {  // a view of an argument
    auto start = static_cast<const char*>(ours.storage().data());
    auto data = static_cast<const char*>(host.const_data_ptr());
    if (host.numel() > 0 && data >= start && data < start + ours.storage().nbytes()) {
      auto offset = (data - start) / static_cast<int64_t>(host.element_size());
      return at::native::as_strided_tensorimpl(ours, host.sizes(), host.strides(), offset);
    }
  }
  return as_device(host);
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = c10::toString(op.operator_name());
  const size_t count = schema.arguments().size(), first = stack->size() - count;
  Arguments arguments{name};
  const bool indexes = INDEXING.count(name) > 0;

  for (size_t i = 0; i < count; i++) {
    const IValue& value = (*stack)[first + i];
    if (value.isTensor()) {
      arguments.look_at(value.toTensor());
    } else if (value.isList()) {
      for (const IValue& element : value.toListRef()) {
        if (!element.isTensor()) continue;
        if (indexes) arguments.look_at_index(element.toTensor(), on_device((*stack)[first].toTensor()));
        else arguments.look_at(element.toTensor());
      }
    }
  }
  TORCH_CHECK(!arguments.any_on_device || arguments.shapes_on_host.empty(), name,
              ": Expected all tensors to be on the same device, but found at least two devices, ", THE_DEVICE,
              " and cpu! (shapes on the host: ", arguments.shapes_on_host, ")");
  if (WAITING.count(name)) wait(name);

  for (size_t i = 0; i < count; i++) {
    IValue& value = (*stack)[first + i];
    if (value.isTensor()) {
      value = arguments.stand_in(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(arguments.stand_in(tensor));
      value = tensors;
    } else if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
      c10::List<std::optional<Tensor>> tensors;
      for (const IValue& element : value.toListRef())
        tensors.push_back(element.isTensor() ? std::make_optional(arguments.stand_in(element.toTensor())) : std::nullopt);
      value = tensors;
    } else if (value.isDevice() && value.toDevice().type() == PRETENDED) {
      value = c10::Device(c10::DeviceType::CPU);
    } else if (value.isGenerator()) {
      value = generator_of(value.toGenerator());
    } else if (value.isNone() && schema.arguments()[i].name() == "generator") {
      value = generator_of(std::nullopt);
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  const size_t results = schema.returns().size();
  for (size_t i = stack->size() - results; i < stack->size(); i++) {
    IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = result_on_device(value.toTensor(), arguments);
    } else if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(result_on_device(tensor, arguments));
      value = tensors;
    }
  }
}

}  // namespace

REGISTER_ALLOCATOR(PRETENDED, &memory);
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("view", TORCH_FN(view));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_local_scalar_dense", TORCH_FN(item));
  m.impl("_fused_sdp_choice", TORCH_FN(attention_by_products));
  m.impl("convolution_overrideable", TORCH_FN(convolution));
  m.impl("histc", TORCH_FN(histc));
  // torch would look at the indices once for the shape, and once more to run it.
  m.impl("index.Tensor", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("default_generator", [] { return default_generator(); });
  m.def("synchronize", [] { wait("synchronize"); });
  m.def("listen", [](py::object heard) {
    delete listener;
    listener = heard.is_none() ? nullptr : new py::object(std::move(heard));
  });
}
