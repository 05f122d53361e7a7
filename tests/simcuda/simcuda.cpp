// A simulated CUDA for a CPU-only torch; README.md beside this file says what it models.
//
// It fills the CUDA dispatch key: tensors on cuda:i are memory of the host, an operator is an entry
// in the queue of its stream, and entries run later, in an order that streams and events restrict
// and the mode chooses. Entries call the operator's CPU kernel on CPU tensors of the same memory.
//
// One mutex guards all of this. Entries run while it is held, so they must not need Python's lock:
// what they leave to be freed goes to `trash`, which is emptied after the mutex is given up.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <unordered_map>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

constexpr auto CUDA = DeviceType::CUDA;
constexpr int64_t POOL = 32;  // streams of a device and priority, handed out in turn, as by torch
constexpr unsigned char POISON = 0xFF;  // NaN as floats, -1 as integers

// ---------------------------------------------------------------------------- clocks and queues

// Stream number → how many of its entries are ordered before a point (a vector clock).
using Clock = std::vector<uint64_t>;

// The end of what a stream was given up to some point. `clock` is known at once, when it is
// recorded; `reached` becomes true when the stream runs up to it. Without a stream it is reached when
// another process says so. One that is recorded in a capture is a part of the graph.
struct Graph;
struct Mark {
  int stream = -1;
  Graph* captured = nullptr;
  bool reached = false;
  Clock clock;
  double milliseconds = 0;
};
using MarkPtr = std::shared_ptr<Mark>;

struct Entry {
  enum Kind { RUN, RECORD, WAIT } kind;
  std::function<void()> run;
  MarkPtr mark;
  std::string name;
};

struct Queue {
  int device;
  int64_t id;  // of the stream on its device; 0 is the default stream
  std::deque<Entry> entries;
  Clock clock;  // what the next entry will be ordered after
  uint64_t given = 0;
  bool starves = false;
};

enum Mode { EAGER, LAZY, RANDOM, STARVING };

std::recursive_mutex mutex_;
int devices = 2;
Mode mode = EAGER;
bool forbid_waits = false;
std::mt19937_64 draw(0);
// Never destroyed: what is still queued when the process ends holds tensors, whose memory could not
// be given back by then.
auto& queues = *new std::vector<std::unique_ptr<Queue>>;
std::map<std::pair<int, int64_t>, int> numbers;  // device, id → index in queues
std::map<std::pair<int, bool>, int64_t> handed;  // device, high priority → streams made
Clock host;                                      // what the host has waited for
std::string failure;                             // of an entry; every later call reports it
std::vector<Entry> trash;
std::vector<std::string> races;
std::set<std::string> raced;
std::map<std::string, int64_t> counts;
std::map<std::string, int64_t> waits;      // of the host: reason → times
std::map<std::string, std::string> odd;    // operators whose results could not be made before a run
thread_local std::string range;            // the NVTX range of this thread
thread_local DeviceIndex current = 0;
thread_local std::map<int, int64_t> current_stream;

struct Locked {
  Locked() {
    mutex_.lock();
    depth()++;
  }
  ~Locked() {
    std::vector<Entry> dropped;
    if (--depth() == 0) dropped.swap(trash);
    mutex_.unlock();
  }
  static int& depth() {
    static thread_local int depth = 0;
    return depth;
  }
};

[[noreturn]] void cuda_error(const std::string& text) {
  throw c10::AcceleratorError({__func__, __FILE__, (uint32_t)__LINE__}, 1, "CUDA error: " + text);
}

void raise_failure() {
  if (!failure.empty()) cuda_error(failure);
}

// Let others go on for a moment: another process has to, before this thread can.
void give_way() {
  int depth = Locked::depth();
  for (int i = 0; i < depth; i++) mutex_.unlock();
  std::this_thread::sleep_for(std::chrono::microseconds(100));
  for (int i = 0; i < depth; i++) mutex_.lock();
}

double now() {
  auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(since).count();
}

uint64_t& at_stream(Clock& clock, int stream) {
  if ((int)clock.size() <= stream) clock.resize(stream + 1, 0);
  return clock[stream];
}

uint64_t at_stream(const Clock& clock, int stream) {
  return stream < (int)clock.size() ? clock[stream] : 0;
}

void merge(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); i++) clock[i] = std::max(clock[i], other[i]);
}

int number(int device, int64_t id) {
  auto [it, made] = numbers.try_emplace({device, id}, (int)queues.size());
  if (made) {
    queues.push_back(std::make_unique<Queue>(Queue{device, id}));
    queues.back()->starves = draw() & 1;
  }
  return it->second;
}

int64_t current_id(int device) {
  auto it = current_stream.find(device);
  return it == current_stream.end() ? 0 : it->second;
}

int current_queue(int device) { return number(device, current_id(device)); }

// Keys that have done their part before an operator comes here, and must not run in an entry.
c10::DispatchKeySet above() {
  using Key = c10::DispatchKey;
  return c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
         c10::python_ks |
         c10::DispatchKeySet({Key::FuncTorchDynamicLayerFrontMode, Key::FuncTorchDynamicLayerBackMode,
                              Key::Functionalize, Key::PythonDispatcher, Key::PreDispatch});
}

// ------------------------------------------------------------------------------- running entries

bool ready(const Queue& queue) {
  if (queue.entries.empty()) return false;
  const Entry& head = queue.entries.front();
  return head.kind != Entry::WAIT || head.mark->reached;
}

void run_head(Queue& queue) {
  Entry entry = std::move(queue.entries.front());
  queue.entries.pop_front();
  if (entry.kind == Entry::RECORD) {
    entry.mark->reached = true;
    entry.mark->milliseconds = now();
  }
  if (entry.kind == Entry::RUN && failure.empty()) {
    c10::impl::ExcludeDispatchKeyGuard guard(above());
    try {
      entry.run();
      counts["executed"]++;
    } catch (const std::exception& error) {
      std::string text = error.what();
      failure = "in " + entry.name + ": " + text.substr(0, text.find('\n'));
    }
  }
  trash.push_back(std::move(entry));
}

std::vector<int> ready_queues(bool fed_only) {
  std::vector<int> found;
  for (size_t i = 0; i < queues.size(); i++)
    if (ready(*queues[i]) && !(fed_only && queues[i]->starves)) found.push_back(i);
  return found;
}

void run_some(int most) {
  for (int i = 0; i < most; i++) {
    auto found = ready_queues(mode == STARVING);
    if (found.empty()) return;
    run_head(*queues[found[draw() % found.size()]]);
  }
}

// After a long time, other streams get nothing.
void starve_others() {
  if (mode == STARVING && draw() % 64 == 0)
    for (auto& queue : queues) queue->starves = draw() & 1;
}

// Run only what a mark needs, which is the latest order that there is. Returns false if another
// process has to go on first.
bool run_for(MarkPtr mark) {
  while (!mark->reached) {
    if (mark->stream < 0) return false;
    Queue& queue = *queues[mark->stream];
    Entry& head = queue.entries.front();
    if (head.kind != Entry::WAIT || head.mark->reached)
      run_head(queue);
    else if (!run_for(head.mark))
      return false;
  }
  return true;
}

void run_until(const MarkPtr& mark) {
  if (mode <= LAZY) {
    while (!run_for(mark)) give_way();
    return;
  }
  while (!mark->reached) {
    auto found = ready_queues(mode == STARVING);
    if (found.empty()) found = ready_queues(false);
    if (found.empty()) {
      give_way();
      continue;
    }
    starve_others();
    run_head(*queues[found[draw() % found.size()]]);
  }
}

void was_given() {
  counts["launched"]++;
  if (mode == EAGER || mode == STARVING) run_some(1 << 30);
  if (mode == RANDOM) run_some(draw() % 3);
}

// Bytes [from, to) of an allocation that an entry reads or writes.
struct Use {
  void* allocation;
  char *from, *to;
  bool writes;
};

// A piece of memory; `number` tells apart those that have had the same address.
struct Piece {
  char* memory;
  size_t size;
  uint64_t number;
};

// What a stream was given during a capture. The memory that is allocated meanwhile belongs to a
// pool, from which nothing else is allocated but by other captures.
struct Graph {
  struct Node {
    std::vector<Use> uses;
    std::string name;
    std::function<void()> run;
  };
  int stream;
  int64_t pool;
  std::vector<Node> nodes;
  std::vector<Piece> made;
  std::string broken;  // why it can only be ended
  bool ended = false;
  ~Graph();
};
using GraphPtr = std::shared_ptr<Graph>;

auto& capture = *new GraphPtr;  // torch allows one at a time; never destroyed, as the queues

const std::string CAPTURING = "operation not permitted when stream is capturing";

[[noreturn]] void break_capture(const std::string& why) {
  if (capture->broken.empty()) capture->broken = why;
  cuda_error(why);
}

// The capture that a stream is in, if any.
Graph* captures(int stream) { return capture && capture->stream == stream ? capture.get() : nullptr; }

MarkPtr record(int stream) {
  Queue& queue = *queues[stream];
  auto mark = std::make_shared<Mark>();
  mark->stream = stream;
  mark->captured = captures(stream);
  if (mark->captured) return mark;
  merge(queue.clock, host);
  at_stream(queue.clock, stream) = ++queue.given;
  mark->clock = queue.clock;
  queue.entries.push_back({Entry::RECORD, nullptr, mark, "record"});
  was_given();
  return mark;
}

void wait(int stream, const MarkPtr& mark) {
  Queue& queue = *queues[stream];
  Graph* graph = captures(stream);
  if (graph && mark->captured == graph) return;
  if (graph) break_capture("dependency created on uncaptured work in another stream");
  if (mark->captured && mark->captured == capture.get())
    break_capture("another stream would join the capture; a simulated one has one stream");
  merge(queue.clock, mark->clock);
  if (mark->stream == stream) return;
  queue.entries.push_back({Entry::WAIT, nullptr, mark, "wait"});
  was_given();
}

void host_waits(const MarkPtr& mark, const std::string& reason) {
  if (mark->captured) break_capture(CAPTURING);
  waits[reason]++;
  TORCH_CHECK(!forbid_waits, "called a synchronizing CUDA operation: ", reason);
  run_until(mark);
  merge(host, mark->clock);
  raise_failure();
}

// ------------------------------------------------------------------------------------------ races

struct Access {
  int stream;
  uint64_t entry;
  char *from, *to;
  bool writes;
  std::string name;
};

std::unordered_map<void*, std::vector<Access>> history;  // allocation → accesses that still matter

void note_race(const Access& before, const Access& after) {
  std::string key = c10::str(before.name, "|", after.name, "|", before.stream, "|", after.stream);
  if (!raced.insert(key).second) return;
  const Queue &one = *queues[before.stream], &other = *queues[after.stream];
  races.push_back(c10::str(after.writes ? "write" : "read", " by [", after.name, "] on cuda:",
                           other.device, " stream ", other.id, " is not ordered after the ",
                           before.writes ? "write" : "read", " by [", before.name, "] on cuda:",
                           one.device, " stream ", one.id));
}

void note_uses(int stream, const std::vector<Use>& uses, const std::string& name) {
  const Queue& queue = *queues[stream];
  for (const Use& use : uses) {
    Access access{stream, queue.given, use.from, use.to, use.writes, name};
    auto& before = history[use.allocation];
    for (const Access& other : before) {
      bool overlap = other.from < use.to && use.from < other.to && (other.writes || use.writes);
      bool ordered = other.stream == stream || at_stream(queue.clock, other.stream) >= other.entry;
      if (overlap && !ordered) note_race(other, access);
    }
    // later accesses that are ordered after this one are ordered after those, too
    auto covered = [&](const Access& other) {
      bool within = use.from <= other.from && other.to <= use.to && (use.writes || !other.writes);
      bool after = other.stream == stream ||
                   (use.writes && at_stream(queue.clock, other.stream) >= other.entry);
      return within && after;
    };
    before.erase(std::remove_if(before.begin(), before.end(), covered), before.end());
    before.push_back(access);
  }
}

void launch(int stream, const std::vector<Use>& uses, const std::string& name,
            std::function<void()> run) {
  Queue& queue = *queues[stream];
  std::string full = range.empty() ? name : range + " / " + name;
  if (Graph* graph = captures(stream)) {
    if (!graph->broken.empty()) cuda_error("operation failed due to a previous error during capture");
    graph->nodes.push_back({uses, name, std::move(run)});
    return;
  }
  merge(queue.clock, host);
  at_stream(queue.clock, stream) = ++queue.given;
  note_uses(stream, uses, full);
  queue.entries.push_back({Entry::RUN, std::move(run), nullptr, full});
  was_given();
}

// ----------------------------------------------------------------------------------------- memory

struct Block {
  char* memory;
  size_t size;
  uint64_t number;
  int64_t pool;  // of captures; 0 outside of them
  int device;
  int stream;          // on which it was allocated, and will be reused
  std::set<int> used;  // the other streams of `record_stream`
};

// A pool of captures cannot be used again when its last graph has gone.
struct Pool {
  int graphs = 0;
  bool gone = false;
  std::vector<std::weak_ptr<Graph>> captures;
};

uint64_t block_number = 0;
std::unordered_map<void*, Block> blocks;
std::map<int64_t, Pool> pools;
std::map<std::tuple<int64_t, int, size_t>, std::vector<char*>> unused;  // pool, stream, size → memory
std::map<int, int64_t> kept_back;  // device → unused bytes of pools
std::vector<std::pair<Block, std::vector<MarkPtr>>> pending;  // freed, but other streams use them
// Bytes by device. As torch counts: what is freed, but others use, is not allocated but active.
std::map<int, int64_t> allocated, active, peak, limits;

// As torch's allocator rounds blocks.
size_t rounded(size_t bytes) { return (bytes + 511) / 512 * 512; }

void give_back(const Block& block) {
  int64_t pool = block.pool && !pools[block.pool].gone ? block.pool : 0;
  active[block.device] -= block.size;
  if (pool) kept_back[block.device] += block.size;
  unused[{pool, block.stream, block.size}].push_back(block.memory);
}

void give_back_pending() {
  for (size_t i = 0; i < pending.size();) {
    auto& [block, marks] = pending[i];
    if (std::all_of(marks.begin(), marks.end(), [](auto& mark) { return mark->reached; })) {
      for (auto& mark : marks) merge(host, mark->clock);
      give_back(block);
      pending.erase(pending.begin() + i);
    } else {
      i++;
    }
  }
}

void release(void* memory) {
  Locked locked;
  auto it = blocks.find(memory);
  if (it == blocks.end()) return;
  Block block = it->second;
  blocks.erase(it);
  counts["frees"]++;
  allocated[block.device] -= block.size;
  if (block.used.empty()) return give_back(block);
  std::vector<MarkPtr> marks;
  for (int stream : block.used) marks.push_back(record(stream));
  pending.emplace_back(block, marks);
}

struct Allocator final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    Locked locked;
    raise_failure();
    give_back_pending();
    Device device(CUDA, current);
    if (bytes == 0) return {nullptr, nullptr, [](void*) {}, device};
    size_t size = rounded(bytes);
    int stream = current_queue(current);
    Graph* graph = captures(stream);
    auto& list = unused[{graph ? graph->pool : 0, stream, size}];
    int64_t limit = limits.count(current) ? limits[current] : int64_t(16) << 30;
    limit -= kept_back[current];
    if (graph && !list.empty()) limit += size;
    if (!graph && active[current] + (int64_t)size > limit) {  // torch waits for other streams
      for (auto& [block, marks] : pending)
        for (auto& mark : marks) run_until(mark);
      give_back_pending();
    }
    TORCH_CHECK_WITH(OutOfMemoryError, active[current] + (int64_t)size <= limit,
                     "CUDA out of memory. Tried to allocate ", size, " bytes. GPU ", (int)current,
                     " has a total capacity of ", limit, " bytes of which ",
                     limit - active[current], " bytes is free.");
    char* memory;
    if (list.empty()) {
      memory = (char*)aligned_alloc(512, size);
      memset(memory, POISON, size);
      counts["mallocs"]++;
    } else {
      memory = list.back();
      list.pop_back();
      counts["reused"]++;
      if (graph) kept_back[current] -= size;
    }
    blocks[memory] = {memory, size, ++block_number, graph ? graph->pool : 0, current, stream, {}};
    if (graph) graph->made.push_back({memory, size, block_number});
    active[current] += size;
    allocated[current] += size;
    peak[current] = std::max(peak[current], allocated[current]);
    return {memory, memory, release, device};
  }
  at::DeleterFnPtr raw_deleter() const override { return release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    memcpy(to, from, bytes);
  }
} allocator;

// --------------------------------------------------------------------------------------- captures

// Fill memory with what nobody should read, in a stream's turn.
void poison(int stream, const std::vector<Piece>& pieces, const std::string& name) {
  if (pieces.empty()) return;
  std::vector<Use> uses;
  for (const Piece& piece : pieces)
    uses.push_back({piece.memory, piece.memory, piece.memory + piece.size, true});
  launch(stream, uses, name, [pieces] {
    for (const Piece& piece : pieces) memset(piece.memory, POISON, piece.size);
  });
}

Graph::~Graph() {
  Locked locked;
  Pool& own = pools[pool];
  if (--own.graphs) return;
  own.gone = true;
  for (auto it = unused.begin(); it != unused.end();) {
    auto [of, stream, size] = it->first;
    if (of == pool) {
      auto& list = unused[{0, stream, size}];
      list.insert(list.end(), it->second.begin(), it->second.end());
      kept_back[queues[stream]->device] -= size * it->second.size();
    }
    it = of == pool ? unused.erase(it) : std::next(it);
  }
}

GraphPtr begin_capture(int device, int64_t id, int64_t pool) {
  Locked locked;
  raise_failure();
  TORCH_CHECK(id, "CUDA graphs must be captured on a non-default stream. (However, after capture, "
                  "it's ok to replay them on the default stream.)");
  TORCH_CHECK(!capture, "another capture is underway; torch allows one at a time in a process");
  TORCH_CHECK(!pools[pool].gone, "use_count > 0 INTERNAL ASSERT FAILED: the graphs of this memory "
                                 "pool have gone");
  pools[pool].graphs++;
  capture = GraphPtr(new Graph{number(device, id), pool});
  return capture;
}

// Returns the error, if the capture cannot be ended well.
std::string end_capture(const GraphPtr& graph) {
  Locked locked;
  if (capture != graph) return "capture_end is called without a capture of this graph";
  capture.reset();
  if (!graph->broken.empty()) {
    graph->nodes.clear();
    return "CUDA error: operation failed due to a previous error during capture";
  }
  graph->ended = true;
  pools[graph->pool].captures.push_back(graph);
  for (const Piece& piece : graph->made) memset(piece.memory, POISON, piece.size);
  return "";
}

// Memory of later captures may lie where this one had values for a moment; what it has made, and
// nobody holds, others may use.
void replay(const GraphPtr& graph, int device, int64_t id) {
  Locked locked;
  raise_failure();
  TORCH_CHECK(graph->ended, "Called CUDAGraph::replay without a preceding successful capture.");
  int stream = number(device, id);
  std::vector<Piece> later, unheld;
  bool after = false;
  for (auto& each : pools[graph->pool].captures) {
    GraphPtr other = each.lock();
    if (after && other) later.insert(later.end(), other->made.begin(), other->made.end());
    after |= other == graph;
  }
  std::set<char*> held;
  for (const Piece& piece : graph->made) {
    auto it = blocks.find(piece.memory);
    if (it != blocks.end() && it->second.number == piece.number) held.insert(piece.memory);
  }
  for (const Piece& piece : graph->made)
    if (!held.count(piece.memory)) unheld.push_back(piece);
  poison(stream, later, "the memory of later captures");
  for (auto& node : graph->nodes) launch(stream, node.uses, "replay of " + node.name, node.run);
  poison(stream, unheld, "what nobody holds of a capture");
}

// Pinned memory of the host. An entry keeps the storage that it copies from or to.
std::map<char*, size_t> pinned;

void unpin(void* memory) {
  Locked locked;
  pinned.erase((char*)memory);
  free(memory);
}

bool is_pinned(const void* address) {
  Locked locked;
  auto it = pinned.upper_bound((char*)address);
  if (it == pinned.begin()) return false;
  --it;
  return (char*)address < it->first + std::max<size_t>(it->second, 1);
}

struct PinnedAllocator final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    Locked locked;
    char* memory = (char*)aligned_alloc(512, rounded(bytes + 1));
    pinned[memory] = bytes;
    return {memory, memory, unpin, Device(DeviceType::CPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    memcpy(to, from, bytes);
  }
} pinned_allocator;

// --------------------------------------------------------------------- what torch asks a device for

DeviceIndex or_current(DeviceIndex index) { return index < 0 ? current : index; }

MarkPtr& mark_of(void* event) { return *(MarkPtr*)event; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return CUDA; }
  Device getDevice() const override { return Device(CUDA, current); }
  void setDevice(Device device) const override { current = or_current(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override {
    current = or_current(device.index());
  }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return devices; }

  static c10::Stream stream(int device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, Device(CUDA, device), id);
  }
  static int queue(const c10::Stream& stream) {
    return number(stream.device_index(), stream.id());
  }
  c10::Stream getStream(Device device) const noexcept override {
    int index = or_current(device.index());
    return stream(index, current_id(index));
  }
  c10::Stream getDefaultStream(Device device) const override {
    return stream(or_current(device.index()), 0);
  }
  c10::Stream getNewStream(Device device, int priority = 0) const override {
    Locked locked;
    int index = or_current(device.index());
    bool high = priority < 0;
    return stream(index, 1 + high * POOL + handed[{index, high}]++ % POOL);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool high = false) const override {
    return getNewStream(device, high ? -1 : 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    c10::Stream before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }

  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete (MarkPtr*)event; }
  void record(void** event, const c10::Stream& stream, DeviceIndex,
              c10::EventFlag) const override {
    Locked locked;
    raise_failure();
    if (!*event) *event = new MarkPtr();
    mark_of(*event) = ::record(queue(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    Locked locked;
    raise_failure();
    if (event && mark_of(event)) wait(queue(stream), mark_of(event));
  }
  bool queryEvent(void* event) const override {
    Locked locked;
    raise_failure();
    if (!event) return true;
    // time passes, so that a host that asks again and again comes to an end
    starve_others();
    if (mode >= RANDOM) run_some(draw() % 3);
    if (mode == LAZY && draw() % 4 == 0) run_some(1);
    raise_failure();
    MarkPtr mark = mark_of(event);
    if (mark->captured && mark->captured == capture.get()) break_capture(CAPTURING);
    if (mark->reached) merge(host, mark->clock);
    return mark->reached;
  }
  bool queryStream(const c10::Stream& stream) const override {
    Locked locked;
    run_some(1);
    raise_failure();
    return queues[queue(stream)]->entries.empty();
  }
  void synchronizeEvent(void* event) const override {
    Locked locked;
    if (event) host_waits(mark_of(event), "event.synchronize");
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Locked locked;
    host_waits(::record(queue(stream)), "stream.synchronize");
  }
  void synchronizeDevice(DeviceIndex device) const override {
    Locked locked;
    if (capture && queues[capture->stream]->device == device) break_capture(CAPTURING);
    std::vector<MarkPtr> marks;
    for (size_t i = 0; i < queues.size(); i++)
      if (queues[i]->device == device) marks.push_back(::record(i));
    for (auto& mark : marks) host_waits(mark, "synchronize");
  }
  double elapsedTime(void* one, void* other, DeviceIndex) const override {
    return mark_of(other)->milliseconds - mark_of(one)->milliseconds;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Locked locked;
    auto it = blocks.find(data.get_context());
    int index = queue(stream);
    if (it != blocks.end() && it->second.stream != index) it->second.used.insert(index);
  }
};

struct Hooks final : at::CUDAHooksInterface {
  Hooks() = default;
  Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return devices; }
  int getNumGPUs() const override { return devices; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex device) const override { current = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    std::swap(device, current);
    return device;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::make_generator<at::CPUGeneratorImpl>();
  }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    static at::Generator generator = at::make_generator<at::CPUGeneratorImpl>();
    return generator;
  }
  Device getDeviceFromPtr(void* address) const override {
    Locked locked;
    auto it = blocks.find(address);
    return Device(CUDA, it == blocks.end() ? 0 : it->second.device);
  }
};

struct Registered {
  Registered() {
    c10::impl::device_guard_impl_registry[(size_t)CUDA].store(new Guard());
    c10::SetAllocator(CUDA, &allocator);
    // torch has asked for its hooks while it was imported, and keeps them: replace them in place
    new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();
    at::CUDAHooksRegistry()->Register("CUDAHooks", [](at::CUDAHooksArgs) {
      return std::unique_ptr<at::CUDAHooksInterface>(new Hooks());
    });
  }
} registered;

// ------------------------------------------------------------------- operators that do not compute

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::CUDA);

Device or_current(std::optional<Device> device) {
  return device && device->has_index() ? *device : Device(CUDA, current);
}

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
             std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>,
             std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(or_current(device));
  return at::detail::empty_generic(size, &allocator, KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                     std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(or_current(device));
  return at::detail::empty_strided_generic(size, stride, &allocator, KEYS,
                                           c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                  std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

Tensor view(const Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }

Tensor reshape_alias(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                    c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, storage, offset, size, stride);
}

Tensor& set_whole(Tensor& self, at::Storage storage) { return at::native::set_(self, storage); }

Tensor& set_tensor(Tensor& self, const Tensor& other) {
  return at::native::set_tensor_(self, other);
}

void make_size(const Tensor& tensor, c10::IntArrayRef size) {
  if (tensor.sizes() == size) return;
  Tensor fresh = empty(size, tensor.scalar_type(), {}, tensor.device(), {}, {});
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(fresh.storage());
  tensor.unsafeGetTensorImpl()->set_storage_offset(0);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size,
                      std::optional<c10::MemoryFormat>) {
  make_size(self, size);
  return self;
}

void record_stream(Tensor& self, c10::Stream stream) {
  c10::impl::getDeviceGuardImpl(CUDA)->recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

// ------------------------------------------------------------------------------------------ copies

bool on_device(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == CUDA; }

// The same memory as a tensor on the CPU. It does not keep the memory, as no kernel does.
Tensor on_host(const Tensor& tensor) {
  void* data = tensor.numel() ? const_cast<void*>(tensor.const_data_ptr()) : nullptr;
  auto options = tensor.options().device(at::kCPU).requires_grad(false).pinned_memory(false);
  return at::from_blob(data, tensor.sizes(), tensor.strides(), options);
}

int64_t reach(const Tensor& tensor) {  // elements from the first to the last
  int64_t elements = 1;
  for (int64_t d = 0; d < tensor.dim(); d++) elements += (tensor.size(d) - 1) * tensor.stride(d);
  return elements;
}

Use use_of(const Tensor& tensor, bool writes) {
  char* from = (char*)tensor.const_data_ptr();
  char* to = from + reach(tensor) * (int64_t)tensor.element_size();
  return {(void*)tensor.storage().data(), from, to, writes};
}

void copy_between(const Tensor& to, const Tensor& from) {
  Tensor target = on_host(to), source = on_host(from);
  if (to.is_neg() != from.is_neg() || to.is_conj() != from.is_conj()) {
    if (from.is_conj()) source = source.conj();
    if (from.is_neg()) source = source._neg_view();
  }
  Locked locked;
  raise_failure();
  int leaving = current_queue(from.device().index()), arriving = current_queue(to.device().index());
  bool crosses = to.device() != from.device();
  // torch copies on the current stream of the source, and orders both devices' streams
  if (crosses) {
    counts["peer_copies"]++;
    wait(leaving, record(arriving));
  }
  launch(leaving, {use_of(from, false), use_of(to, true)}, "copy_",
         [target, source]() mutable { target.copy_(source); });
  if (crosses) wait(arriving, record(leaving));
}

void copy_to_device(const Tensor& to, const Tensor& from, bool non_blocking) {
  TORCH_CHECK(from.device().is_cpu());
  bool in_place = is_pinned(from.const_data_ptr()) && from.scalar_type() == to.scalar_type();
  bool later = non_blocking && in_place;  // pageable memory is copied at once, as by CUDA
  Tensor source = later ? from.detach() : from.to(from.options().pinned_memory(false), false, true);
  Tensor target = on_host(to);
  Locked locked;
  raise_failure();
  int stream = current_queue(to.device().index());
  if (captures(stream) && !later) break_capture(CAPTURING);
  launch(stream, {use_of(to, true)}, later ? "copy_ from pinned" : "copy_ from host",
         [target, source]() mutable { target.copy_(source); });
  if (!non_blocking) host_waits(record(stream), "copy from the host");
}

void copy_to_host(const Tensor& to, const Tensor& from, bool non_blocking) {
  bool later = non_blocking && is_pinned(to.const_data_ptr());
  Tensor source = on_host(from), target = to.detach();
  Locked locked;
  raise_failure();
  int stream = current_queue(from.device().index());
  launch(stream, {use_of(from, false)}, "copy_ to host",
         [target, source]() mutable { target.copy_(source); });
  if (!later) host_waits(record(stream), "copy to the host");
}

Tensor& copy_(Tensor& self, const Tensor& given, bool non_blocking) {
  if (self.numel() == 0) return self;
  c10::impl::ExcludeDispatchKeyGuard below(above());
  Tensor from = given.sizes() == self.sizes() ? given : given.expand(self.sizes());
  if (on_device(self) && on_device(from))
    copy_between(self, from);
  else if (on_device(self))
    copy_to_device(self, from, non_blocking);
  else
    copy_to_host(self, from, non_blocking);
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  Tensor target = to;
  copy_(target, self, non_blocking);
  return target;
}

at::Scalar item(const Tensor& self) {
  Locked locked;
  int stream = current_queue(self.device().index());
  launch(stream, {use_of(self, false)}, "item", [] {});
  host_waits(record(stream), "item");
  return on_host(self).item();
}

// ------------------------------------------------------------------------- all operators that compute

template <class F>
c10::IValue mapped(const c10::IValue& value, F change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional<Tensor>(change(*tensor)) : tensor);
    return list;
  }
  return value;
}

template <class F>
void for_each(const c10::IValue& value, F visit) {
  mapped(value, [&](const Tensor& tensor) {
    visit(tensor);
    return tensor;
  });
}

c10::IValue moved(const c10::IValue& value, DeviceType type) {
  return value.isDevice() ? c10::IValue(Device(type)) : value;
}

// The same sizes and strides without data, from which an operator makes those of its results.
Tensor without_data(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  auto options = tensor.options().device(at::kMeta).requires_grad(false).pinned_memory(false);
  int64_t elements = std::max<int64_t>(reach(tensor) + tensor.storage_offset(), 0);
  return at::empty({elements}, options)
      .as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

// Whether a result is what the call has written to one of its arguments.
bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

bool is_tensors(const c10::Argument& result) {
  return result.type()->isSubtypeOf(*c10::TensorType::get()) ||
         result.type()->isSubtypeOf(*c10::ListType::ofTensors());
}

// Call a CPU kernel. What draws without a generator leaves the host's as it is: devices have others.
void call_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return op.callBoxed(stack);
  static auto& own = *new Tensor;  // the state that devices draw from
  at::Generator host = at::detail::getDefaultCPUGenerator();
  Tensor before = host.get_state();
  if (own.defined()) host.set_state(own);
  op.callBoxed(stack);
  own = host.get_state();
  host.set_state(before);
}

// One call of an operator. Its results are allocated at once, with the sizes that the operator's
// meta kernel gives; an entry computes them later by the CPU kernel. Where there is no meta kernel,
// or a size depends on data, the host waits, as it does on a GPU.
struct Call {
  const c10::OperatorHandle& op;
  const std::vector<c10::Argument>&arguments, &returned;
  std::vector<c10::IValue> args, results;
  std::vector<Tensor> written;  // the tensors that are written in place, in order
  Device device{CUDA, current};
  std::string name, problem;

  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op(op),
        arguments(op.schema().arguments()),
        returned(op.schema().returns()),
        args(stack->end() - arguments.size(), stack->end()) {
    torch::jit::drop(*stack, arguments.size());
    name = op.schema().name();
    if (!op.schema().overload_name().empty()) name += "." + op.schema().overload_name();
    bool found = false;
    for (size_t i = 0; i < args.size(); i++) {
      bool writes = is_written(arguments[i]);
      for_each(args[i], [&](const Tensor& tensor) {
        if (on_device(tensor) && !found) device = tensor.device(), found = true;
        if (writes) written.push_back(tensor);
      });
      if (args[i].isDevice() && !found) device = args[i].toDevice();
    }
    if (!device.has_index()) device = Device(CUDA, current);
  }

  bool in_place() const {
    return std::all_of(returned.begin(), returned.end(), is_written);
  }

  // Whether results are the written arguments, which have their sizes already.
  bool has_sizes() const {
    return in_place() && std::none_of(written.begin(), written.end(), [](const Tensor& tensor) {
             return tensor.numel() == 0 && tensor.dim() == 1;
           });
  }

  Tensor allocated_like(const Tensor& meta) const {
    if (!meta.defined()) return meta;
    return empty_strided(meta.sizes(), meta.strides(), meta.scalar_type(), {}, device, {});
  }

  // Allocate the results. Returns whether that was possible before the data is there.
  bool allocate() {
    if (!std::all_of(returned.begin(), returned.end(), is_tensors)) return false;
    if (has_sizes()) {
      for (size_t i = 0; i < returned.size(); i++)
        results.push_back(i < written.size() ? c10::IValue(written[i]) : args[0]);
      return true;
    }
    try {
      torch::jit::Stack stack;
      for (auto& arg : args) stack.push_back(mapped(moved(arg, DeviceType::Meta), without_data));
      op.callBoxed(&stack);
      for (size_t i = 0; i < returned.size(); i++) {
        TORCH_CHECK(in_place() || !returned[i].alias_info(), "it returns a view");
        if (in_place()) make_size(written[i], stack[i].toTensor().sizes());
        results.push_back(in_place() ? c10::IValue(written[i])
                                     : mapped(stack[i], [&](const Tensor& meta) {
                                         return allocated_like(meta);
                                       }));
      }
      return true;
    } catch (const c10::Error& error) {
      problem = error.what_without_backtrace();
    } catch (const std::exception& error) {
      problem = error.what();
    }
    results.clear();
    return false;
  }

  std::vector<Use> uses() const {
    std::vector<Use> found;
    for (size_t i = 0; i < args.size(); i++)
      for_each(args[i], [&](const Tensor& tensor) {
        if (on_device(tensor) && tensor.numel())
          found.push_back(use_of(tensor, is_written(arguments[i])));
      });
    return found;
  }

  std::vector<c10::IValue> args_on_host() const {
    std::vector<c10::IValue> found;
    for (auto& arg : args)
      found.push_back(mapped(moved(arg, DeviceType::CPU), [](const Tensor& tensor) {
        return on_device(tensor) ? on_host(tensor) : tensor;
      }));
    return found;
  }

  void run_now(torch::jit::Stack* stack) {
    if (!problem.empty()) odd[name] = problem;
    int stream = current_queue(device.index());
    launch(stream, uses(), name, [] {});
    host_waits(record(stream), "results of " + name);
    torch::jit::Stack found(args_on_host());
    call_kernel(op, &found);
    for (size_t i = 0; i < returned.size(); i++) {
      if (is_written(returned[i])) {
        torch::jit::push(*stack, written[i]);
        continue;
      }
      torch::jit::push(*stack, mapped(found[i], [&](const Tensor& result) {
        Tensor copy = allocated_like(result);
        if (copy.defined()) copy_(copy, result, false);
        return copy;
      }));
    }
  }

  void run_later(torch::jit::Stack* stack) {
    std::vector<Use> uses = this->uses();
    std::vector<Tensor> outs;
    if (!in_place())
      for (auto& result : results)
        for_each(result, [&](const Tensor& tensor) {
          if (on_device(tensor) && tensor.numel()) uses.push_back(use_of(tensor, true));
          outs.push_back(tensor.defined() ? on_host(tensor) : tensor);
        });
    auto inputs = args_on_host();
    std::vector<size_t> given;  // `out=` arguments, which CPU kernels may resize in between
    for (size_t i = 0; i < args.size(); i++)
      if (arguments[i].kwarg_only() && is_written(arguments[i]) && inputs[i].isTensor())
        given.push_back(i);
    launch(current_queue(device.index()), uses, name, [op = op, inputs, outs, given]() mutable {
      torch::jit::Stack found(inputs);
      for (size_t i : given) found[i] = at::empty({0}, inputs[i].toTensor().options());
      call_kernel(op, &found);
      for (size_t k = 0; k < given.size(); k++)
        inputs[given[k]].toTensor().copy_(found[k].toTensor());
      size_t k = 0;
      if (outs.empty()) return;
      for (auto& value : found)
        for_each(value, [&](const Tensor& result) {
          Tensor out = outs[k++];
          // a kernel leaves out what backward does not need, as BatchNorm's in evaluation
          if (!out.defined() || !result.defined() || !result.numel()) return;
          TORCH_CHECK(out.sizes() == result.sizes(), "other sizes than its meta kernel gives");
          out.copy_(result);
        });
    });
    for (auto& result : results) torch::jit::push(*stack, result);
  }
};

void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard below(above());
  Call call(op, stack);
  c10::DeviceGuard guard(call.device);
  bool allocated = call.allocate();  // may need Python's lock: before ours
  Locked locked;
  raise_failure();
  if (allocated)
    call.run_later(stack);
  else
    call.run_now(stack);
}

std::vector<std::string> preferred;  // operators whose CPU kernels are run though torch has others

// ------------------------------------------------------ kernels that torch has for CUDA devices only

// An LSTM's cell in one kernel; its workspace has the gates after their activations.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input, const Tensor& hidden,
                                             const Tensor& cx,
                                             const std::optional<Tensor>& input_bias,
                                             const std::optional<Tensor>& hidden_bias) {
  Tensor gates = input + hidden;
  if (input_bias && input_bias->defined()) gates = gates + *input_bias + *hidden_bias;
  auto parts = gates.chunk(4, 1);
  Tensor in = parts[0].sigmoid(), forget = parts[1].sigmoid();
  Tensor cell = parts[2].tanh(), out = parts[3].sigmoid();
  Tensor cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const std::optional<Tensor>& grad_hy, const std::optional<Tensor>& grad_cy, const Tensor& cx,
    const Tensor& cy, const Tensor& workspace, bool has_bias) {
  auto parts = workspace.chunk(4, 1);
  Tensor in = parts[0], forget = parts[1], cell = parts[2], out = parts[3];
  Tensor squashed = cy.tanh(), hy = at::zeros_like(cy), grad = at::zeros_like(cy);
  if (grad_hy && grad_hy->defined()) hy = *grad_hy;
  if (grad_cy && grad_cy->defined()) grad = *grad_cy;
  grad = grad + hy * out * (1 - squashed * squashed);
  Tensor gates = at::cat({grad * cell * in * (1 - in), grad * cx * forget * (1 - forget),
                          grad * in * (1 - cell * cell), hy * squashed * out * (1 - out)},
                         1);
  Tensor bias = has_bias ? gates.sum(0) : at::empty({0}, gates.options());
  return {gates, grad * forget, bias};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward_sizes(
    const std::optional<Tensor>&, const std::optional<Tensor>&, const Tensor& cx, const Tensor&,
    const Tensor& workspace, bool has_bias) {
  Tensor gates = at::empty_like(workspace), bias = at::empty({0}, gates.options());
  if (has_bias) bias = at::empty({workspace.size(1)}, gates.options());
  return {gates, at::empty_like(cx), bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", item);
  m.impl("record_stream", record_stream);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>());
}

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
}

TORCH_LIBRARY_IMPL(aten, Meta, m) {
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward_sizes);
}

// An operator that torch can compose of others goes there before it comes to a fallback. If the CPU
// has a kernel for it all the same, as for LayerNorm, it goes to that.
void prefer_kernels() {
  using Key = c10::DispatchKey;
  static std::vector<c10::RegistrationHandleRAII> kept;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || name.name.rfind("aten::", 0) != 0) continue;
    const auto& returned = op->schema().returns();
    bool view = std::any_of(returned.begin(), returned.end(), [](const c10::Argument& result) {
      return result.alias_info() && !is_written(result);
    });
    bool composed = op->hasKernelForDispatchKey(Key::CompositeExplicitAutograd);
    if (view || !composed || !op->hasKernelForDispatchKey(Key::CPU) ||
        op->hasKernelForDispatchKey(Key::CUDA))
      continue;
    auto kernel = c10::KernelFunction::makeFromBoxedFunction<&compute>();
    kept.push_back(dispatcher.registerImpl(name, Key::CUDA, std::move(kernel), std::nullopt,
                                           nullptr, "the simulated CUDA"));
    preferred.push_back(name.name);
  }
}

// ------------------------------------------------------------------- transfers between processes

// One send or receive. Its two sides tell each other by the store, under names that both count.
// It keeps no tensor: whoever frees one has let a stream wait for its end, so that the memory is used
// by nothing before that.
struct Transfer {
  char* memory;
  size_t size;
  bool sends;
  std::string name;
  bool told = false, done = false;
};

Transfer transfer_of(const Tensor& tensor, bool sends, const std::string& name) {
  return {(char*)tensor.const_data_ptr(), tensor.nbytes(), sends, name};
}

// What a communicator was given by one call, or by several between startCoalescing and endCoalescing.
struct Group {
  void* communicator;
  c10::intrusive_ptr<c10d::Store> store;
  std::vector<Transfer> transfers;
  MarkPtr start;  // the stream has come to it
  MarkPtr over;   // a mark without a stream
};

std::deque<Group> groups;

bool advance(Transfer& transfer, c10d::Store& store) {
  std::string there = transfer.name + "/there", data = transfer.name + "/data";
  char* memory = transfer.memory;
  size_t size = transfer.size;
  if (!transfer.sends && !transfer.told) {
    store.set(there, std::vector<uint8_t>{1});
    transfer.told = true;
  }
  if (transfer.done || !store.check({transfer.sends ? there : data})) return transfer.done;
  if (transfer.sends) {
    store.set(data, std::vector<uint8_t>(memory, memory + size));
  } else {
    std::vector<uint8_t> bytes = store.get(data);
    if (bytes.size() != size && failure.empty())
      failure = c10::str("a receive of ", size, " bytes meets a send of ", bytes.size());
    memcpy(memory, bytes.data(), std::min(size, bytes.size()));
    store.deleteKey(data);
    store.deleteKey(there);
  }
  return transfer.done = true;
}

void end_group(size_t i) {
  groups[i].over->reached = true;
  trash.push_back({Entry::RUN, [group = std::move(groups[i])] {}, nullptr, ""});
  groups.erase(groups.begin() + i);
}

// Devices go on by themselves, whatever the host does. Here a thread does that for all that a
// transfer waits for. It frees nothing, since it must not need Python's lock.
void make_progress() {
  for (;;) {
    mutex_.lock();
    for (size_t i = 0; i < groups.size();) {
      Group& group = groups[i];
      bool over = false;
      try {
        over = run_for(group.start);
        for (Transfer& transfer : group.transfers) over = over && advance(transfer, *group.store);
        if (group.start->reached)  // those of one group do not wait for each other
          for (Transfer& transfer : group.transfers) advance(transfer, *group.store);
      } catch (const std::exception& error) {  // such as a store whose process has ended
        if (failure.empty()) failure = c10::str("a transfer has failed: ", error.what());
        over = true;
      }
      if (over) {
        end_group(i);
      } else {
        i++;
      }
    }
    mutex_.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

struct TransferWork final : c10d::Work {
  std::vector<Tensor> kept;  // until a stream waits, as by torch
  int device = -1;
  MarkPtr end;
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    std::vector<Tensor> waited;  // freed behind the lock: that may take Python's
    Locked locked;
    raise_failure();
    TORCH_CHECK(end, "the transfer was not started, as endCoalescing was not called");
    ::wait(current_queue(device), end);
    waited.swap(kept);
  }
  bool isCompleted() override {
    Locked locked;
    if (end) run_for(end);  // time passes for a host that asks again and again
    return end && end->reached;
  }
};

// A communicator of NCCL's: it runs what it is given in the order of the calls on a stream of its own,
// whatever the tags are. A send ends when its receive is there. A collective is a group of sends and
// receives, with this rank too; a sum is then computed from what has come, beginning with the last
// rank: NCCL's order is its own, but the same on all ranks.
struct Communicator final : c10d::Backend {
  c10::intrusive_ptr<c10d::Store> store;
  std::map<int, int> streams;  // device → its stream
  std::map<std::string, int64_t> count;
  bool aborted = false;
  int open = 0;
  std::vector<std::pair<Transfer, c10::intrusive_ptr<TransferWork>>> collected;
  std::vector<Tensor> given;  // the tensor of each of them

  Communicator(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size)
      : Backend(rank, size), store(store->clone()) {
    static std::once_flag once;
    std::call_once(once, [] { std::thread(make_progress).detach(); });
  }
  ~Communicator() override { abort(); }
  const std::string getBackendName() const override { return "simulated nccl"; }
  bool supportsCoalescing() const override { return true; }

  c10::intrusive_ptr<c10d::Work> send(std::vector<Tensor>& tensors, int target, int) override {
    return add(tensors, true, getRank(), target);
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<Tensor>& tensors, int source, int) override {
    return add(tensors, false, source, getRank());
  }
  void startCoalescing() override { open++; }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    if (--open || collected.empty()) return nullptr;
    return start();
  }
  void abort() override {
    Locked locked;
    aborted = true;
    for (size_t i = groups.size(); i-- > 0;)
      if (groups[i].communicator == this) end_group(i);
  }
  void shutdown() override { abort(); }

  c10::intrusive_ptr<c10d::Work> add(std::vector<Tensor>& tensors, bool sends, int from, int to) {
    Locked locked;
    TORCH_CHECK(!aborted, "NCCL communicator was aborted on rank ", getRank());
    TORCH_CHECK(tensors.size() == 1 && on_device(tensors[0]) && tensors[0].is_contiguous(),
                "a send or a receive takes one contiguous tensor of a CUDA device");
    std::string pair = c10::str(from, ">", to, "/");
    auto work = c10::make_intrusive<TransferWork>();
    collected.push_back({transfer_of(tensors[0], sends, pair + std::to_string(count[pair]++)), work});
    given.push_back(tensors[0]);
    if (!open) start();
    return work;
  }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<Tensor>& tensors,
                                           const c10d::BroadcastOptions& given) override {
    int root = (int)given.rootRank;
    if (getRank() != root) return add(tensors, false, root, getRank());
    startCoalescing();
    for (int rank = 0; rank < getSize(); rank++)
      if (rank != root) add(tensors, true, root, rank);
    return endCoalescing();
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(Tensor& out, Tensor& in,
                                                 const c10d::AllgatherOptions&) override {
    return exchange("nccl:all_gather", out, in, true, false);
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& to,
                                               std::vector<int64_t>& from,
                                               const c10d::AllToAllOptions&) override {
    TORCH_CHECK(to.empty() && from.empty(), "parts of other sizes are not simulated");
    return exchange("nccl:all_to_all", out, in, false, false);
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<Tensor>& tensors,
                                           const c10d::AllreduceOptions& given) override {
    TORCH_CHECK(given.reduceOp == c10d::ReduceOp::SUM, "only sums are simulated");
    return exchange("nccl:all_reduce", tensors.at(0), tensors.at(0), true, true);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& given) override {
    TORCH_CHECK(given.reduceOp == c10d::ReduceOp::SUM, "only sums are simulated");
    return exchange("nccl:reduce_scatter", out, in, false, true);
  }

  // Give all of `in` to each rank, or to each its part; `out` gets what comes, or the sum of that.
  c10::intrusive_ptr<c10d::Work> exchange(const char* name, const Tensor& out, const Tensor& in,
                                          bool whole, bool sums) {
    Locked locked;
    TORCH_CHECK(!aborted, "NCCL communicator was aborted on rank ", getRank());
    TORCH_CHECK(!open, name, " inside of a group is not simulated");
    TORCH_CHECK(on_device(in) && on_device(out) && in.is_contiguous() && out.is_contiguous(),
                name, " takes contiguous tensors of a CUDA device");
    int64_t size = getSize(), each = in.numel() / (whole ? 1 : size);
    TORCH_CHECK(in.numel() == each * (whole ? 1 : size) &&
                    out.numel() == each * (sums ? 1 : size) &&
                    in.scalar_type() == out.scalar_type(),
                name, " takes tensors of other sizes");
    Tensor leaves = whole ? on_host(in).reshape({1, each}).expand({size, each})
                          : on_host(in).reshape({size, each});
    Tensor arrived = sums ? at::empty({size, each}, leaves.options())
                          : on_host(out).view({size, each});
    for (int rank = 0; rank < size; rank++) {
      std::string to = c10::str(getRank(), ">", rank, "/"), from = c10::str(rank, ">", getRank(), "/");
      collected.push_back({transfer_of(leaves[rank], true, to + std::to_string(count[to]++)), nullptr});
      std::string name =
          rank == getRank() ? collected.back().first.name : from + std::to_string(count[from]++);
      collected.push_back({transfer_of(arrived[rank], false, name), nullptr});
    }
    auto work = c10::make_intrusive<TransferWork>();
    collected.back().second = work;
    std::function<void()> sum;
    if (sums) {
      sum = [arrived, target = on_host(out).view({each})]() mutable {
        Tensor total = arrived[arrived.size(0) - 1].clone();
        for (int64_t rank = arrived.size(0) - 1; rank-- > 0;) total.add_(arrived[rank]);
        target.copy_(total);
      };
    }
    std::vector<Use> uses;
    if (in.numel()) uses = {use_of(in, false), use_of(out, true)};
    start(name, {in, out}, uses, sum);
    return work;
  }

  c10::intrusive_ptr<c10d::Work> start() {
    std::vector<Use> uses;
    std::vector<Tensor> kept;
    kept.swap(given);
    for (size_t i = 0; i < kept.size(); i++)
      if (kept[i].numel()) uses.push_back(use_of(kept[i], !collected[i].first.sends));
    auto last = collected.back().second;
    start(collected[0].first.sends ? "nccl:send" : "nccl:recv", kept, uses, nullptr);
    return last;
  }

  // Start what was collected, on the device of the tensors that it keeps, and compute `then` behind it.
  void start(const char* name, const std::vector<Tensor>& kept, const std::vector<Use>& uses,
             std::function<void()> then) {
    Locked locked;
    raise_failure();
    int device = kept[0].device().index();
    auto [it, made] = streams.try_emplace(device, 0);
    if (made) it->second = number(device, 1 + POOL + handed[{device, true}]++ % POOL);
    int stream = it->second;
    ::wait(stream, record(current_queue(device)));
    Group group{this, store};
    for (auto& [transfer, work] : collected) group.transfers.push_back(transfer);
    launch(stream, uses, name, [] {});
    group.start = record(stream);
    group.over = std::make_shared<Mark>();
    queues[stream]->entries.push_back({Entry::WAIT, nullptr, group.over, "the other rank"});
    groups.push_back(group);
    if (then) launch(stream, uses, name, std::move(then));
    MarkPtr end = record(stream);
    for (auto& [transfer, work] : collected)
      if (work) work->end = end, work->device = device, work->kept = kept;
    collected.clear();
  }
};

// What tests/simcuda/cuda.py and tests ask for. Maps and lists are emptied when they are read.
template <class T>
T taken(T& from) {
  Locked locked;
  return std::exchange(from, {});
}

PYBIND11_MODULE(_simcuda, m) {
  prefer_kernels();
  m.def("preferred_operators", [] { return preferred; });
  m.def("configure", [](int new_mode, uint64_t seed, int count) {
    Locked locked;
    for (;;) {
      auto found = ready_queues(false);
      if (found.empty()) break;
      run_head(*queues[found[0]]);
    }
    mode = (Mode)new_mode;
    devices = count;
    draw.seed(seed);
    for (auto& queue : queues) queue->starves = draw() & 1;
  });
  py::class_<Graph, GraphPtr>(m, "Graph");
  m.def("begin_capture", begin_capture);
  m.def("end_capture", end_capture);
  m.def("replay", replay);
  m.def("is_capturing", [] {
    Locked locked;
    return captures(current_queue(current)) != nullptr;
  });
  m.def("nccl", [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Communicator>(store, rank, size));
  });
  m.def("forbid_waits", [](bool on) { forbid_waits = on; });
  m.def("take_failure", [] { return taken(failure); });
  m.def("take_races", [] {
    Locked locked;
    raced.clear();
    return taken(races);
  });
  m.def("take_counts", [] { return taken(counts); });
  m.def("take_waits", [] { return taken(waits); });
  m.def("odd_operators", [] {
    Locked locked;
    return odd;
  });
  m.def("unfinished", [] {
    Locked locked;
    size_t entries = 0;
    for (auto& queue : queues) entries += queue->entries.size();
    return entries;
  });
  m.def("name_range", [](std::string name) { return std::exchange(range, name); });
  m.def("elapsed", [](uintptr_t one, uintptr_t other) {
    Locked locked;
    return mark_of((void*)other)->milliseconds - mark_of((void*)one)->milliseconds;
  });
  m.def("allocated", [](int device) {
    Locked locked;
    return allocated[device];
  });
  m.def("taken", [](int device) {  // with what no allocation gets yet
    Locked locked;
    return active[device] + kept_back[device];
  });
  m.def("peak", [](int device) {
    Locked locked;
    return peak[device];
  });
  m.def("reset_peak", [](int device) {
    Locked locked;
    peak[device] = allocated[device];
  });
  m.def("set_limit", [](int device, int64_t bytes) {
    Locked locked;
    limits[device] = bytes;
  });
  m.def("limit", [](int device) {
    Locked locked;
    return limits.count(device) ? limits[device] : int64_t(16) << 30;
  });
  m.def("current_device", [] { return (int)current; });
  m.def("set_device", [](int device) { current = device; });
}
