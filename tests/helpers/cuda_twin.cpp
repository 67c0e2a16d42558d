// A device "cuda:0" for builds of torch without CUDA: its tensors say so, their numbers lie in the host's memory, and
// torch's kernels for the CPU compute them. Counts launches and waits of the host; records and replays graphs.

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>

namespace {

using at::Tensor;
using c10::IValue;
using c10::OperatorHandle;
using Stack = torch::jit::Stack;

const c10::Device DEVICE(c10::DeviceType::CUDA, 0);
constexpr int64_t MEMORY = int64_t(1) << 36;  // bytes

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return DEVICE; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
c10::impl::DeviceGuardImplRegistrar guard(c10::DeviceType::CUDA, new Guard());

// One kernel of a graph: what to call, with tensors of the host, and the tensors that hold its results.
struct Kernel {
  OperatorHandle operation;
  Stack arguments;
  std::vector<Tensor> results;
};
struct Graph {
  std::vector<Kernel> kernels;
  std::map<void*, c10::Storage> new_memory;  // of the capture
  bool has_failed = false;                   // CUDA ends such a capture with an error
};

std::mutex lock;
std::map<std::string, int64_t> launches, waits;
bool waiting_is_an_error = false;
bool generator_is_capturing = false;  // the state of the default generator
std::map<int64_t, std::shared_ptr<Graph>> graphs;
thread_local std::shared_ptr<Graph> recording;

// Kernels of a draw of one sample in CUDA: noise, division and argmax; the rest checks the probabilities.
constexpr int64_t MULTINOMIAL = 14;

const std::set<std::string> NO_LAUNCH = {"empty", "empty_strided", "resize_", "set_", "_local_scalar_dense"};
const std::set<std::string> WAITS = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_consecutive", "unique_dim",
    "bincount"};
const std::set<std::string> DRAWS = {
    "multinomial", "bernoulli_", "exponential_", "normal_", "uniform_", "random_", "native_dropout"};
const std::set<std::string> TAKES_BOTH = {"copy_", "index", "index_put_", "_index_put_impl_"};

void wait(const std::string& name) {
  if (recording) recording->has_failed = true;
  TORCH_CHECK(!recording, "CUDA error: operation not permitted when stream is capturing (", name, ")");
  TORCH_CHECK(!waiting_is_an_error, "called a synchronizing CUDA operation (", name, ")");
  std::lock_guard<std::mutex> held(lock);
  ++waits[name];
}

// The memory of a tensor of the device: the context of its pointer.
c10::Storage memory_of(const Tensor& tensor) {
  return *static_cast<c10::Storage*>(tensor.storage().data_ptr().get_context());
}

c10::DataPtr pointer_to(const c10::Storage& memory) {
  auto drop = [](void* context) { delete static_cast<c10::Storage*>(context); };
  return {memory.mutable_data(), new c10::Storage(memory), drop, DEVICE};
}

Tensor with_sizes_of(Tensor tensor, const Tensor& like) {
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

Tensor tensor_of(c10::Storage memory, c10::DispatchKey key, const Tensor& like) {
  c10::DispatchKeySet keys(key);
  return with_sizes_of(at::detail::make_tensor<c10::TensorImpl>(std::move(memory), keys, like.dtype()), like);
}

// A view of a tensor in inference mode is of the kind that the tensor is.
Tensor view_of(const Tensor& tensor, const Tensor& like) {
  c10::Storage memory = tensor.storage();
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, std::move(memory), tensor.key_set(), like.dtype());
  return with_sizes_of(view, like);
}

// Tensors of the device that are passed in, and the tensors of the host that replace them.
struct Swap {
  std::vector<std::pair<Tensor, Tensor>> pairs;

  Tensor to_host(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    auto host = tensor_of(memory_of(tensor), c10::DispatchKey::CPU, tensor);
    pairs.emplace_back(tensor, host);
    return host;
  }

  // The caller's own tensor where an operation returns it, a view of its memory where it shares that.
  Tensor to_device(const Tensor& host) {
    if (!host.defined()) return host;
    for (auto& [tensor, its_host] : pairs)
      if (its_host.is_same(host)) return tensor;
    for (auto& [tensor, its_host] : pairs)
      if (its_host.storage().is_alias_of(host.storage())) return view_of(tensor, host);
    c10::Storage storage(
        c10::Storage::use_byte_size_t(), host.storage().nbytes(), pointer_to(host.storage()), nullptr, false);
    return tensor_of(storage, c10::DispatchKey::CUDA, host);
  }

  bool has_memory_of(const Tensor& host) {
    return std::any_of(pairs.begin(), pairs.end(), [&](auto& pair) { return pair.second.is_alias_of(host); });
  }

  // What resized a tensor of the host, or gave it other memory, did that to the device's.
  void follow() {
    for (auto& [tensor, host] : pairs) {
      auto* impl = tensor.unsafeGetTensorImpl();
      if (!host.storage().is_alias_of(memory_of(tensor))) {
        impl->set_storage_keep_dtype(to_device(tensor_of(host.storage(), c10::DispatchKey::CPU, host)).storage());
      } else if (host.storage().data() != tensor.storage().data()) {
        impl->unsafe_storage().set_data_ptr_noswap(pointer_to(host.storage()));
        impl->unsafe_storage().set_nbytes(host.storage().nbytes());
      }
      if (host.sizes() != tensor.sizes() || host.strides() != tensor.strides())
        impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }
};

template <typename Change>
IValue changed(const IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
      list.push_back(tensor ? std::optional<Tensor>(change(*tensor)) : tensor);
    return list;
  }
  return value;
}

std::vector<Tensor> tensors_of(const IValue& value) {
  std::vector<Tensor> tensors;
  changed(value, [&](const Tensor& tensor) {
    if (tensor.defined()) tensors.push_back(tensor);
    return tensor;
  });
  return tensors;
}

bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return false;
}

void count(const std::string& name, const c10::FunctionSchema& schema, const Stack& arguments) {
  if (name == "copy_" && arguments[0].toTensor().device() != arguments[1].toTensor().device()) {
    if (!arguments[2].toBool()) wait(arguments[0].toTensor().is_cuda() ? "copy to the device" : "copy to the host");
  } else if (WAITS.count(name)) {
    wait(name);
  } else if (name == "_grouped_mm" && arguments[0].toTensor().scalar_type() != at::kBFloat16) {
    wait(name);
  } else if (name == "repeat_interleave" && arguments.back().isNone()) {
    wait(name);
  } else if (TAKES_BOTH.count(name) && name != "copy_") {
    for (const Tensor& index : tensors_of(arguments[1])) {
      bool is_mask = index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
      bool fills = name != "index" && arguments[2].toTensor().numel() == 1;
      if ((is_mask && !fills) || !index.is_cuda()) wait(name);
    }
  }
  TORCH_CHECK(
      !DRAWS.count(name) || generator_is_capturing == bool(recording),
      "Offset increment outside graph capture encountered unexpectedly (", name, ")");
  if (NO_LAUNCH.count(name) || is_view(schema)) return;
  std::lock_guard<std::mutex> held(lock);
  launches[name] += name == "multinomial" ? MULTINOMIAL : 1;
}

void call(const OperatorHandle& operation, Stack& stack) {
  const auto& name = operation.schema().name();
  if (name == "aten::histc") stack[0] = stack[0].toTensor().to(at::kFloat);
  bool is_softmax = name == "aten::_softmax" || name == "aten::_log_softmax";
  if (is_softmax && stack[2].toBool()) {  // halves to fp32 in one kernel
    stack[0] = stack[0].toTensor().to(at::kFloat);
    stack[2] = false;
  }
  operation.callBoxed(stack);
}

// The arguments in the host's memory. Numbers of the host are read by kernels; tensors of it are not.
Stack on_host(const OperatorHandle& operation, const std::string& name, const Stack& arguments, Swap& swap) {
  Stack host;
  bool has_foreign = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    for (const Tensor& tensor : tensors_of(arguments[i])) has_foreign |= !tensor.is_cuda() && tensor.dim() > 0;
    auto value = changed(arguments[i], [&](const Tensor& tensor) { return swap.to_host(tensor); });
    bool is_device = operation.schema().arguments()[i].name() == "device";
    bool is_pinned = operation.schema().arguments()[i].name() == "pin_memory" && value.isBool() && value.toBool();
    TORCH_CHECK(!is_pinned, "Only dense CPU tensors can be pinned");
    host.push_back(is_device ? IValue(c10::Device(c10::kCPU)) : value);
  }
  TORCH_CHECK(
      !has_foreign || swap.pairs.empty() || TAKES_BOTH.count(name),
      "Expected all tensors to be on the same device, but got cpu and cuda:0 (", name, ")");
  return host;
}

// Kernels that write into memory from before the capture are only recorded.
bool runs_in_capture(const c10::FunctionSchema& schema, const Stack& host) {
  for (size_t i = 0; i < host.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (!alias || !alias->isWrite()) continue;
    for (const Tensor& tensor : tensors_of(host[i]))
      if (!recording->new_memory.count(tensor.storage().unsafeGetStorageImpl())) return false;
  }
  return true;
}

void run(const OperatorHandle& operation, Stack* stack) {
  const auto& schema = operation.schema();
  auto name = schema.name().substr(schema.name().find("::") + 2);
  size_t size = schema.arguments().size();
  Stack arguments(stack->end() - size, stack->end());
  stack->erase(stack->end() - size, stack->end());
  count(name, schema, arguments);
  Swap swap;
  Stack host = on_host(operation, name, arguments, swap);
  Stack results = host;
  if (recording && !runs_in_capture(schema, host)) {
    recording->kernels.push_back({operation, host, {}});
    for (const auto& result : schema.returns())
      for (size_t i = 0; i < size; ++i)
        if (schema.arguments()[i].alias_info() && *schema.arguments()[i].alias_info() == *result.alias_info())
          stack->push_back(arguments[i]);
    return;
  }
  {
    c10::impl::ExcludeDispatchKeyGuard no_modes(
        c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
    at::AutoDispatchBelowADInplaceOrView below;
    call(operation, results);
  }
  swap.follow();
  if (recording && !is_view(schema))
    for (const IValue& result : results)
      for (const Tensor& tensor : tensors_of(result))
        if (!swap.has_memory_of(tensor))
          recording->new_memory.emplace(tensor.storage().unsafeGetStorageImpl(), tensor.storage());
  if (recording && !NO_LAUNCH.count(name) && !is_view(schema)) {
    Kernel kernel{operation, host, {}};
    for (const IValue& result : results)
      for (const Tensor& tensor : tensors_of(result)) kernel.results.push_back(tensor);
    recording->kernels.push_back(kernel);
  }
  for (const IValue& result : results)
    stack->push_back(changed(result, [&](const Tensor& tensor) { return swap.to_device(tensor); }));
}

void replay(const Graph& graph) {
  c10::InferenceMode inference;
  for (const Kernel& kernel : graph.kernels) {
    Stack stack = kernel.arguments;
    call(kernel.operation, stack);
    size_t index = 0;
    for (const IValue& value : stack)
      for (const Tensor& tensor : tensors_of(value)) {
        if (index == kernel.results.size()) break;
        const Tensor& result = kernel.results[index++];
        if (!result.is_same(tensor) && result.data_ptr() != tensor.data_ptr()) result.copy_(tensor);
      }
  }
}

// Memory is not pinned: torch has no allocator for that. More than the device has raises torch.OutOfMemoryError.
Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device>, std::optional<bool>, std::optional<at::MemoryFormat> memory_format) {
  auto numbers = c10::multiply_integers(C10_AS_INTARRAYREF_SLOW(size));
  TORCH_CHECK_WITH(OutOfMemoryError, numbers <= MEMORY, "CUDA out of memory: tried to allocate ", numbers, " numbers");
  return at::detail::empty_generic_symint(
      size, c10::GetCPUAllocator(), c10::DispatchKeySet(c10::DispatchKey::CPU),
      dtype.value_or(c10::get_default_dtype_as_scalartype()), memory_format);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CPU, m) { m.impl("empty.memory_format", &empty); }

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

// What torch puts together of other operations where a device has no kernel for it.
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  for (const char* name :
       {"copy_", "scaled_dot_product_attention", "convolution", "native_layer_norm", "_fused_rms_norm"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run>());
}

extern "C" {

void twin_begin_capture() { recording = std::make_shared<Graph>(); }

int twin_is_capturing() { return recording != nullptr; }

// Returns whether the capture had no error.
int twin_end_capture(int64_t number) {
  std::lock_guard<std::mutex> held(lock);
  bool has_failed = !recording || recording->has_failed;
  graphs[number] = std::move(recording);
  return !has_failed;
}

void twin_fail_capture() {
  if (recording) recording->has_failed = true;
}

void twin_mark_generator(int is_capturing) { generator_is_capturing = is_capturing; }

void twin_replay(int64_t number) {
  std::shared_ptr<Graph> graph;
  {
    std::lock_guard<std::mutex> held(lock);
    graph = graphs.at(number);
  }
  replay(*graph);
}

void twin_drop(int64_t number) {
  std::lock_guard<std::mutex> held(lock);
  graphs.erase(number);
}

// "launches" or "waits": lines of a name and a number; valid in this thread until it asks again.
const char* twin_counts(const char* of) {
  thread_local std::string text;
  text.clear();
  std::lock_guard<std::mutex> held(lock);
  for (const auto& [name, number] : std::string(of) == "waits" ? waits : launches)
    text += name + " " + std::to_string(number) + "\n";
  return text.c_str();
}

void twin_waiting_is_an_error(int is_error) { waiting_is_an_error = is_error; }
}
