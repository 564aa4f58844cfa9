// SPDX-License-Identifier: MIT
#include <fake/internal.hpp>
#include <fake/nccl.hpp>
#include <fake/nccl_data.hpp>

#include <algorithm>
#include <cstring>
#include <memory>
#include <set>
#include <span>
#include <sstream>

// Communicators, and the meetings of their calls on the streams' threads.

namespace fake::detail {
namespace {

enum class kind : std::uint8_t { reduce_scatter, all_gather, all_reduce, broadcast, send, receive };

char const* name_of(kind what) {
  constexpr std::array names{"ncclReduceScatter", "ncclAllGather", "ncclAllReduce",
                             "ncclBroadcast",     "ncclSend",      "ncclRecv"};
  return names[static_cast<std::size_t>(what)];
}

// One call of one rank.
struct nccl_op {
  kind what = kind::all_reduce;
  void const* input = nullptr;
  void* output = nullptr;
  std::size_t count = 0;
  ncclDataType_t type = ncclFloat32;
  ncclRedOp_t op = ncclSum;
  int peer = 0;  // or the root
  ncclComm* comm = nullptr;
  cudaStream_t stream = nullptr;

  [[nodiscard]] bool is_pair() const { return what == kind::send || what == kind::receive; }
};

// Where calls meet: those of all ranks, or a send and its receive.
struct meeting {
  explicit meeting(std::size_t size) : calls(size, nullptr), leave(new flag[size]) {}

  std::atomic<int> order{0};  // what each did before happened before what the last does
  // Under the lock:
  std::vector<nccl_op const*> calls;
  std::size_t arrived = 0;
  std::size_t left = 0;
  bool broken = false;
  bool running = false;

  std::unique_ptr<flag[]> leave;  // of each
};

// Meetings in order, of which each participant attends one after the other.
struct channel {
  explicit channel(std::size_t participants) : attended(participants, 0) {}

  std::vector<std::uint64_t> attended;
  std::uint64_t first = 0;  // the number of the first in the deque
  std::deque<meeting> meetings;

  meeting& attend_locked(std::size_t who) {
    std::uint64_t const number = attended[who]++;
    while (number >= first + meetings.size()) {
      meetings.emplace_back(attended.size());
    }
    return meetings[static_cast<std::size_t>(number - first)];
  }
  void leave_locked(meeting& from) {
    ++from.left;
    while (!meetings.empty() && meetings.front().left == attended.size()) {
      meetings.pop_front();
      ++first;
    }
  }
};

struct nccl_world {
  nccl_world(int ranks) : size{ranks}, all{static_cast<std::size_t>(ranks)} {}

  int size;
  std::vector<ncclComm*> members;
  channel all;
  std::map<std::pair<int, int>, channel> pairs;  // of the sending and the receiving rank
};

struct waiting {
  meeting* where;
  std::size_t who;
};

}  // namespace
}  // namespace fake::detail

// Lives until the program ends: work that was captured may refer to it.
struct ncclComm {
  fake::detail::nccl_world* world = nullptr;
  int rank = 0;
  int device = 0;
  bool blocking = true;
  fake::detail::flag initialised;
  // Under the lock:
  bool live = true;
  bool aborted = false;
  int polls_in_progress = 0;
  ncclResult_t failure = ncclSuccess;
  bool complete = false;  // all ranks are there
  std::string last_error;
  std::vector<fake::detail::waiting> waits;
  std::uint64_t split_calls = 0;
  std::size_t in_flight = 0;  // calls that a stream has not ended
  std::size_t graphs = 0;     // which captured calls, and were not destroyed
  bool finalizing = false;
};

namespace fake::detail {
namespace {

struct window {
  ncclComm* comm;
  std::byte const* memory;
  std::size_t bytes;
  bool symmetric;
};

ncclComm* owner(ncclComm* comm) { return comm; }
ncclComm* owner(window const& of) { return of.comm; }

struct nccl_state {
  bool share = false;
  bool refuses_windows = false;
  int version = NCCL_VERSION_CODE;
  std::uint64_t ids = 0;
  std::string difference;
  std::string misuse;
  std::deque<ncclComm> comms;
  std::map<std::string, std::unique_ptr<nccl_world>> worlds;
  std::map<void*, ncclComm*> registrations;
  std::map<void*, window> windows;
  std::map<void*, std::size_t> allocations;
  std::uintptr_t handles = 0;
};

nccl_state& nccl() {
  static nccl_state& it = *new nccl_state;
  return it;
}

thread_local int group_depth = 0;
thread_local ncclResult_t group_error = ncclSuccess;
thread_local std::vector<nccl_op> group_ops;
thread_local std::string thread_error;

ncclResult_t refuse(ncclComm* comm, ncclResult_t code, std::string const& why) {
  thread_error = why;
  if (comm != nullptr) {
    comm->last_error = why;
  }
  if (group_depth > 0 && group_error == ncclSuccess) {
    group_error = code;
  }
  return code;
}

// Count the call; what it must return without doing anything.
ncclResult_t enter_nccl(char const* function) {
  count(function);
  cudaError_t const told = fail_if_told(function);
  if (told == cudaSuccess) {
    return ncclSuccess;
  }
  return refuse(nullptr,
                told == cudaErrorMemoryAllocation ? ncclUnhandledCudaError : ncclSystemError,
                std::string{"told to fail: "} + function);
}

std::string describe(nccl_op const& call) {
  std::ostringstream out;
  out << name_of(call.what) << "(count " << call.count << ", type " << call.type << ", op "
      << call.op << ", root " << call.peer << ") of rank " << call.comm->rank;
  return out.str();
}

bool same_call(nccl_op const& a, nccl_op const& b) {
  if (a.is_pair() && b.is_pair()) {
    return a.count == b.count && a.type == b.type;
  }
  return a.what == b.what && a.count == b.count && a.type == b.type && a.op == b.op &&
         a.peer == b.peer;
}

// Give all participants an error, and leave them waiting, if their calls differ.
bool fail_different_locked(meeting& here) {
  for (nccl_op const* call : here.calls) {
    if (!same_call(*here.calls.front(), *call)) {
      std::string const text = describe(*here.calls.front()) + " met " + describe(*call);
      if (nccl().difference.empty()) {
        nccl().difference = text;
      }
      for (nccl_op const* each : here.calls) {
        each->comm->failure = ncclInvalidUsage;
        each->comm->last_error = text;
      }
      return true;
    }
  }
  return false;
}

// Where the memory lies in a symmetric window, or -1.
std::ptrdiff_t window_offset_locked(ncclComm const* comm, void const* memory) {
  auto const at = reinterpret_cast<std::uintptr_t>(memory);
  for (auto const& [handle, each] : nccl().windows) {
    auto const begin = reinterpret_cast<std::uintptr_t>(each.memory);
    if (each.symmetric && each.comm == comm && at >= begin && at < begin + each.bytes) {
      return static_cast<std::ptrdiff_t>(at - begin);
    }
  }
  return -1;
}

// What peers read or write of a call has every rank's offset; the rest is in a window on all ranks,
// or on none.
void check_offsets_locked(meeting const& here) {
  nccl_op const& first = *here.calls.front();
  auto const offsets_of = [&](nccl_op const& call) {
    bool const reads = first.what != kind::all_gather;
    bool const writes = first.what != kind::reduce_scatter;
    std::ptrdiff_t const input = window_offset_locked(call.comm, call.input);
    std::ptrdiff_t const output = window_offset_locked(call.comm, call.output);
    return std::pair{reads ? input : std::min<std::ptrdiff_t>(input, 0),
                     writes ? output : std::min<std::ptrdiff_t>(output, 0)};
  };
  for (nccl_op const* call : here.calls) {
    if (!first.is_pair() && offsets_of(*call) != offsets_of(first) && nccl().misuse.empty()) {
      nccl().misuse =
          "other offsets in symmetric windows: " + describe(first) + ", " + describe(*call);
    }
  }
}

void move_elements(void const* from, void* to, std::size_t bytes) {
  if (from != to && bytes != 0) {
    std::memmove(to, from, bytes);
  }
}

void move_data(std::vector<nccl_op const*> const& calls) {
  nccl_op const& first = *calls.front();
  std::size_t const ranks = calls.size();
  std::size_t const size = nccl_size(first.type);
  std::size_t const bytes = first.count * size;
  std::vector<void const*> inputs;
  for (nccl_op const* call : calls) {
    inputs.push_back(call->input);
  }
  auto const output = [&](std::size_t rank) {
    return static_cast<std::byte*>(calls[rank]->output);
  };
  if (first.is_pair()) {
    move_elements(inputs[0], output(1), bytes);
    return;
  }
  switch (first.what) {
    case kind::reduce_scatter: {
      std::vector<std::byte> slice(bytes);
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        nccl_reduce(inputs, rank * first.count, first.count, rank, first.type, first.op,
                    slice.data());
        move_elements(slice.data(), output(rank), bytes);
      }
      break;
    }
    case kind::all_reduce: {
      std::vector<std::byte> whole(bytes);
      std::size_t const slice = (first.count + ranks - 1) / ranks;
      for (std::size_t rank = 0; rank < ranks && rank * slice < first.count; ++rank) {
        nccl_reduce(inputs, rank * slice, std::min(slice, first.count - rank * slice), rank,
                    first.type, first.op, whole.data() + rank * slice * size);
      }
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        move_elements(whole.data(), output(rank), bytes);
      }
      break;
    }
    case kind::all_gather:
      for (std::size_t to = 0; to < ranks; ++to) {
        for (std::size_t from = 0; from < ranks; ++from) {
          move_elements(inputs[from], output(to) + from * bytes, bytes);
        }
      }
      break;
    case kind::broadcast:
      for (std::size_t to = 0; to < ranks; ++to) {
        move_elements(inputs[static_cast<std::size_t>(first.peer)], output(to), bytes);
      }
      break;
    default: break;
  }
}

struct attendance {
  channel* road = nullptr;
  meeting* where = nullptr;  // null: the communicator was aborted before
  std::size_t who = 0;
  ncclComm* comm = nullptr;
};

// Come to the meeting of a call; the last to come moves the data.
attendance arrive(nccl_op const& call) {
  attendance here{.comm = call.comm};
  nccl_world& world = *call.comm->world;
  {
    hidden_lock const lock;
    if (call.comm->aborted) {
      return here;
    }
    if (call.is_pair()) {
      bool const sends = call.what == kind::send;
      int const from = sends ? call.comm->rank : call.peer;
      int const to = sends ? call.peer : call.comm->rank;
      here.road = &world.pairs.try_emplace(std::pair{from, to}, std::size_t{2}).first->second;
      here.who = sends ? 0 : 1;
    } else {
      here.road = &world.all;
      here.who = static_cast<std::size_t>(call.comm->rank);
    }
    here.where = &here.road->attend_locked(here.who);
    here.where->calls[here.who] = &call;
    call.comm->waits.push_back({here.where, here.who});
  }
  meeting& at = *here.where;
  at.order.fetch_add(1, std::memory_order_acq_rel);
  {
    hidden_lock const lock;
    if (++at.arrived != at.calls.size() || at.broken || fail_different_locked(at)) {
      return here;
    }
    check_offsets_locked(at);
    at.running = true;
  }
  at.order.fetch_add(1, std::memory_order_acq_rel);
  move_data(at.calls);
  for (std::size_t who = 0; who < at.calls.size(); ++who) {
    at.leave[who].set();
  }
  return here;
}

void leave(attendance const& here) {
  if (here.where == nullptr) {
    return;
  }
  here.where->leave[here.who].wait();
  hidden_lock const lock;
  std::erase_if(here.comm->waits, [&](waiting const& each) {
    return each.where == here.where && each.who == here.who;
  });
  here.road->leave_locked(*here.where);
}

// All calls of a group in one stream run at once.
void run_ops(std::vector<nccl_op> const& ops) {
  std::vector<attendance> pairs;
  for (nccl_op const& each : ops) {
    if (each.is_pair()) {
      pairs.push_back(arrive(each));
    }
  }
  for (nccl_op const& each : ops) {
    if (!each.is_pair()) {
      leave(arrive(each));
    }
  }
  for (attendance const& each : pairs) {
    leave(each);
  }
}

void add_in_flight(std::vector<nccl_op> const& ops) {
  hidden_lock const lock;
  for (nccl_op const& each : ops) {
    ++each.comm->in_flight;
  }
}

void end_in_flight(std::vector<nccl_op> const& ops) {
  hidden_lock const lock;
  for (nccl_op const& each : ops) {
    --each.comm->in_flight;
  }
}

// Whether the stream captures, into a graph that the communicators then wait for.
bool capture_comms(cudaStream_t stream, std::vector<nccl_op> const& ops) {
  CUstream_st* const found = find_stream(stream);
  hidden_lock const lock;
  if (found == nullptr || found->capturing == nullptr) {
    return false;
  }
  for (nccl_op const& each : ops) {
    ++each.comm->graphs;
    retain_in_graph_locked(*found, {each.comm, [](ncclComm* comm) { --comm->graphs; }});
  }
  return true;
}

void wait_for_graphs(ncclComm const& comm) {
  for (;;) {
    {
      hidden_lock const lock;
      if (comm.graphs == 0) {
        return;
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds{1});
  }
}

ncclResult_t launch_group(std::vector<nccl_op> ops) {
  bool in_progress = false;
  while (!ops.empty()) {
    cudaStream_t const stream = ops.front().stream;
    std::vector<nccl_op> together;
    std::copy_if(ops.begin(), ops.end(), std::back_inserter(together),
                 [&](nccl_op const& each) { return each.stream == stream; });
    std::erase_if(ops, [&](nccl_op const& each) { return each.stream == stream; });
    std::vector<ncclComm*> comms;
    for (nccl_op const& each : together) {
      comms.push_back(each.comm);
    }
    bool const captured = capture_comms(stream, together);
    if (!captured) {
      add_in_flight(together);
    }
    cudaError_t const error = enqueue(stream, [together, captured] {
      if (captured) {
        add_in_flight(together);
      }
      run_ops(together);
      end_in_flight(together);
    });
    if (error != cudaSuccess) {
      if (!captured) {
        end_in_flight(together);
      }
      return refuse(nullptr, ncclUnhandledCudaError, cudaGetErrorString(error));
    }
    hidden_lock const lock;
    for (ncclComm* const each : comms) {
      if (!each->blocking) {
        each->polls_in_progress = 1;
        in_progress = true;
      }
    }
  }
  return in_progress ? ncclInProgress : ncclSuccess;
}

// Whether the communicator can be used, in words otherwise.
ncclResult_t check_ready_locked(ncclComm* comm) {
  if (comm == nullptr || !comm->live) {
    return refuse(nullptr, ncclInvalidArgument, "no communicator");
  }
  if (comm->aborted) {
    return refuse(comm, ncclInvalidArgument, "the communicator was aborted");
  }
  if (comm->failure != ncclSuccess) {
    return refuse(comm, comm->failure, comm->last_error);
  }
  if (!comm->complete || comm->polls_in_progress > 0) {
    return refuse(comm, ncclInvalidArgument,
                  "used before the previous operation was complete: it returned ncclInProgress");
  }
  return ncclSuccess;
}

ncclResult_t add_op(nccl_op call) {
  if (ncclResult_t const told = enter_nccl(name_of(call.what)); told != ncclSuccess) {
    return told;
  }
  {
    hidden_lock const lock;
    if (ncclResult_t const error = check_ready_locked(call.comm); error != ncclSuccess) {
      return error;
    }
    if (nccl_size(call.type) == 0) {
      return refuse(call.comm, ncclInvalidArgument, "unknown type");
    }
    bool const has_peer = call.is_pair() || call.what == kind::broadcast;
    if (has_peer && (call.peer < 0 || call.peer >= call.comm->world->size)) {
      return refuse(call.comm, ncclInvalidArgument, "no such peer or root");
    }
    bool const reads = call.what != kind::receive &&
                       (call.what != kind::broadcast || call.peer == call.comm->rank);
    if (call.count != 0 &&
        ((reads && call.input == nullptr) || (call.what != kind::send && call.output == nullptr))) {
      return refuse(call.comm, ncclInvalidArgument, "a null buffer");
    }
    if (call.comm->device != current_device()) {
      return refuse(call.comm, ncclInvalidUsage, "another device is current");
    }
  }
  if (group_depth > 0) {
    group_ops.push_back(call);
    return ncclSuccess;
  }
  return launch_group({call});
}

void finish_init_locked(nccl_world& world) {
  std::set<int> devices;
  ncclResult_t result = ncclSuccess;
  for (ncclComm const* each : world.members) {
    if (!devices.insert(each->device).second && !nccl().share) {
      result = ncclInvalidUsage;
    }
  }
  for (ncclComm* const each : world.members) {
    each->complete = true;
    each->failure = result;
    if (result != ncclSuccess) {
      each->last_error = "Duplicate GPU detected : two ranks use one device";
    }
    each->initialised.set();
  }
}

ncclResult_t join_world(ncclComm_t* comm, int ranks, std::string const& id, int rank,
                        bool blocking) {
  ncclComm* made = nullptr;
  {
    hidden_lock const lock;
    auto& world = nccl().worlds[id];
    if (world == nullptr) {
      world = std::make_unique<nccl_world>(ranks);
    }
    made = &nccl().comms.emplace_back();
    made->rank = rank;
    made->device = current_device();
    made->blocking = blocking;
    made->polls_in_progress = blocking ? 0 : 1;
    made->world = world.get();
    *comm = made;
    bool const known = std::any_of(world->members.begin(), world->members.end(),
                                   [&](ncclComm const* each) { return each->rank == rank; });
    if (world->size != ranks || known) {
      made->failure = ncclInvalidUsage;
      made->last_error = known
                             ? "Bootstrap Root : rank " + std::to_string(rank) + " checked in twice"
                             : "Bootstrap Root : mismatch in rank count from procs " +
                                   std::to_string(world->size) + " : " + std::to_string(ranks);
      made->initialised.set();
    } else {
      world->members.push_back(made);
      std::sort(world->members.begin(), world->members.end(),
                [](ncclComm const* a, ncclComm const* b) { return a->rank < b->rank; });
      if (world->members.size() == static_cast<std::size_t>(ranks)) {
        finish_init_locked(*world);
      }
    }
  }
  if (!blocking) {
    return ncclInProgress;
  }
  made->initialised.wait();
  hidden_lock const lock;
  return made->failure;
}

// Let the streams go on that wait in the communicator's calls.
void abort_comm(ncclComm& comm) {
  std::vector<waiting> waits;
  {
    hidden_lock const lock;
    comm.aborted = true;
    waits = comm.waits;
    for (waiting const& each : waits) {
      if (!each.where->running) {
        each.where->broken = true;
        each.where->leave[each.who].set();
      }
    }
    if (!comm.complete && !comm.initialised.seems_set()) {
      comm.initialised.set();
    }
  }
}

bool is_live(ncclComm const* comm) {
  hidden_lock const lock;
  return comm != nullptr && comm->live;
}

void end_comm(ncclComm& comm) {
  hidden_lock const lock;
  auto const mine = [&](auto const& each) { return owner(each.second) == &comm; };
  std::erase_if(nccl().registrations, mine);
  std::erase_if(nccl().windows, mine);
  comm.live = false;
}

// The memory of ncclMemAlloc's that this is a part of, or none.
std::span<std::byte const> allocation_of_locked(void const* memory) {
  auto const at = reinterpret_cast<std::uintptr_t>(memory);
  for (auto const& [start, bytes] : nccl().allocations) {
    auto const begin = reinterpret_cast<std::uintptr_t>(start);
    if (at >= begin && at < begin + bytes) {
      return {static_cast<std::byte const*>(start), bytes};
    }
  }
  return {};
}

void* new_handle_locked() { return reinterpret_cast<void*>(++nccl().handles << 4U); }

// Whether a rank has not come to its end.
bool peer_goes_on_locked(ncclComm const& comm) {
  auto const& all = comm.world->members;
  return std::any_of(all.begin(), all.end(), [](ncclComm const* each) {
    return each->live && !each->aborted && !each->finalizing;
  });
}

template <class F>
ncclResult_t nccl_query(char const* function, ncclComm_t comm, F body) {
  if (ncclResult_t const told = enter_nccl(function); told != ncclSuccess) {
    return told;
  }
  hidden_lock const lock;
  if (comm == nullptr || !comm->live) {
    return refuse(nullptr, ncclInvalidArgument, "no communicator");
  }
  return body();
}

bool is_blocking(ncclConfig_t const* config) {
  return config == nullptr || config->blocking == NCCL_CONFIG_UNDEF_INT || config->blocking != 0;
}

template <class Owned>
ncclResult_t deregister(char const* function, std::map<void*, Owned>& from, ncclComm* comm,
                        void* handle) {
  ncclResult_t const told = enter_nccl(function);
  hidden_lock const lock;
  if (comm != nullptr && comm->in_flight != 0 && nccl().misuse.empty()) {
    nccl().misuse = std::string{function} + " during a call of rank " + std::to_string(comm->rank);
  }
  auto const found = from.find(handle);
  if (comm == nullptr || !comm->live || found == from.end() || owner(found->second) != comm) {
    return refuse(nullptr, ncclInvalidArgument, "no such handle");
  }
  from.erase(found);
  return told;
}

}  // namespace
}  // namespace fake::detail

namespace fake {

using detail::hidden_lock;
using detail::nccl;

void reset_nccl() {
  hidden_lock const lock;
  nccl().share = false;
  nccl().refuses_windows = false;
  nccl().version = NCCL_VERSION_CODE;
  nccl().difference.clear();
  nccl().misuse.clear();
}

void allow_shared_device(bool allow) {
  hidden_lock const lock;
  nccl().share = allow;
}

void refuse_windows(bool refuse) {
  hidden_lock const lock;
  nccl().refuses_windows = refuse;
}

void set_nccl_version(int version) {
  hidden_lock const lock;
  nccl().version = version;
}

void fail_communicator(int rank, ncclResult_t error) {
  hidden_lock const lock;
  for (ncclComm& each : nccl().comms) {
    if (each.live && each.rank == rank) {
      each.failure = error;
      each.last_error = "told to fail";
    }
  }
}

void fail_communicator(ncclComm_t comm, ncclResult_t error) {
  hidden_lock const lock;
  comm->failure = error;
  comm->last_error = "told to fail";
}

std::string nccl_difference() {
  hidden_lock const lock;
  return nccl().difference;
}

std::string nccl_misuse() {
  hidden_lock const lock;
  return nccl().misuse;
}

std::size_t live_communicators() {
  hidden_lock const lock;
  return static_cast<std::size_t>(std::count_if(nccl().comms.begin(), nccl().comms.end(),
                                                [](ncclComm const& each) { return each.live; }));
}
std::size_t live_registrations() {
  hidden_lock const lock;
  return nccl().registrations.size();
}
std::size_t live_windows() {
  hidden_lock const lock;
  return nccl().windows.size();
}
std::size_t live_nccl_allocations() {
  hidden_lock const lock;
  return nccl().allocations.size();
}

}  // namespace fake

using namespace fake::detail;

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  if (ncclResult_t const told = enter_nccl("ncclGetVersion"); told != ncclSuccess) {
    return told;
  }
  hidden_lock const lock;
  *version = nccl().version;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  if (ncclResult_t const told = enter_nccl("ncclGetUniqueId"); told != ncclSuccess) {
    return told;
  }
  hidden_lock const lock;
  std::memset(id->internal, 0, sizeof id->internal);
  std::string const text = "fake " + std::to_string(++nccl().ids);
  std::memcpy(id->internal, text.data(), text.size());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  if (ncclResult_t const told = enter_nccl("ncclCommInitRankConfig"); told != ncclSuccess) {
    return told;
  }
  if (ranks < 1 || rank < 0 || rank >= ranks) {
    return refuse(nullptr, ncclInvalidArgument, "invalid rank requested");
  }
  return join_world(comm, ranks, std::string{id.internal, sizeof id.internal}, rank,
                    is_blocking(config));
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  if (ncclResult_t const told = enter_nccl("ncclCommInitRank"); told != ncclSuccess) {
    return told;
  }
  if (ranks < 1 || rank < 0 || rank >= ranks) {
    return refuse(nullptr, ncclInvalidArgument, "invalid rank requested");
  }
  return join_world(comm, ranks, std::string{id.internal, sizeof id.internal}, rank, true);
}

// A part without a call for every rank of it waits for ever, as with NCCL.
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* part,
                           ncclConfig_t* config) {
  if (ncclResult_t const told = enter_nccl("ncclCommSplit"); told != ncclSuccess) {
    return told;
  }
  struct vote {
    int color;
    int key;
    int rank;
  };
  static auto& votes = *new std::map<std::pair<nccl_world*, std::uint64_t>, std::vector<vote>>;
  std::pair<nccl_world*, std::uint64_t> place;
  {
    hidden_lock const lock;
    if (ncclResult_t const error = check_ready_locked(comm); error != ncclSuccess) {
      return error;
    }
    place = {comm->world, comm->split_calls++};
    votes[place].push_back({color, key, comm->rank});
  }
  for (;;) {  // it needs all ranks' votes to know how large the part is
    {
      hidden_lock const lock;
      if (comm->aborted) {
        return refuse(comm, ncclInvalidUsage, "aborted");
      }
      if (votes[place].size() == static_cast<std::size_t>(comm->world->size)) {
        break;
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds{100});
  }
  std::vector<vote> mine;
  std::string id;
  {
    hidden_lock const lock;
    for (vote const& each : votes[place]) {
      if (each.color == color) {
        mine.push_back(each);
      }
    }
    std::ostringstream text;
    text << "split " << place.first << ' ' << place.second << ' ' << color;
    id = text.str();
  }
  if (color == NCCL_SPLIT_NOCOLOR) {
    *part = nullptr;
    return ncclSuccess;
  }
  std::sort(mine.begin(), mine.end(), [](vote const& a, vote const& b) {
    return std::pair{a.key, a.rank} < std::pair{b.key, b.rank};
  });
  auto const here = std::find_if(mine.begin(), mine.end(),
                                 [&](vote const& each) { return each.rank == comm->rank; });
  return join_world(part, static_cast<int>(mine.size()), id, static_cast<int>(here - mine.begin()),
                    config == nullptr ? comm->blocking : is_blocking(config));
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  return nccl_query("ncclCommFinalize", comm, [&] {
    if (ncclResult_t const error = check_ready_locked(comm); error != ncclSuccess) {
      return error;
    }
    comm->finalizing = true;
    if (!comm->blocking) {
      comm->polls_in_progress = 1;
      return ncclInProgress;
    }
    return ncclSuccess;
  });
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  ncclResult_t const told = enter_nccl("ncclCommDestroy");
  if (!is_live(comm)) {
    return refuse(nullptr, ncclInvalidArgument, "no communicator");
  }
  wait_for_graphs(*comm);
  end_comm(*comm);
  return told;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  ncclResult_t const told = enter_nccl("ncclCommAbort");
  if (!is_live(comm)) {
    return refuse(nullptr, ncclInvalidArgument, "no communicator");
  }
  abort_comm(*comm);
  wait_for_graphs(*comm);
  end_comm(*comm);
  return told;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  return nccl_query("ncclCommGetAsyncError", comm, [&] {
    if (comm->failure != ncclSuccess) {
      *error = comm->failure;
    } else if (!comm->complete) {
      *error = ncclInProgress;
    } else if (comm->finalizing && (comm->graphs != 0 || peer_goes_on_locked(*comm))) {
      *error = ncclInProgress;
    } else if (comm->polls_in_progress > 0) {
      --comm->polls_in_progress;
      *error = ncclInProgress;
    } else {
      *error = ncclSuccess;
    }
    return ncclSuccess;
  });
}

char const* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
      return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    default: return "unknown result code";
  }
}

char const* ncclGetLastError(ncclComm_t comm) {
  static thread_local std::string text;
  hidden_lock const lock;
  text = comm != nullptr && !comm->last_error.empty() ? comm->last_error : thread_error;
  return text.c_str();
}

ncclResult_t ncclCommCount(ncclComm_t const comm, int* count) {
  return nccl_query("ncclCommCount", comm, [&] {
    *count = comm->world->size;
    return ncclSuccess;
  });
}

ncclResult_t ncclCommUserRank(ncclComm_t const comm, int* rank) {
  return nccl_query("ncclCommUserRank", comm, [&] {
    *rank = comm->rank;
    return ncclSuccess;
  });
}

ncclResult_t ncclCommCuDevice(ncclComm_t const comm, int* device) {
  return nccl_query("ncclCommCuDevice", comm, [&] {
    *device = comm->device;
    return ncclSuccess;
  });
}

ncclResult_t ncclReduceScatter(void const* input, void* output, std::size_t count,
                               ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream) {
  return add_op({kind::reduce_scatter, input, output, count, type, op, 0, comm, stream});
}

ncclResult_t ncclAllGather(void const* input, void* output, std::size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return add_op({kind::all_gather, input, output, count, type, ncclSum, 0, comm, stream});
}

ncclResult_t ncclAllReduce(void const* input, void* output, std::size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return add_op({kind::all_reduce, input, output, count, type, op, 0, comm, stream});
}

ncclResult_t ncclBroadcast(void const* input, void* output, std::size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  return add_op({kind::broadcast, input, output, count, type, ncclSum, root, comm, stream});
}

ncclResult_t ncclSend(void const* input, std::size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return add_op({kind::send, input, nullptr, count, type, ncclSum, peer, comm, stream});
}

ncclResult_t ncclRecv(void* output, std::size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return add_op({kind::receive, nullptr, output, count, type, ncclSum, peer, comm, stream});
}

ncclResult_t ncclGroupStart() {
  if (ncclResult_t const told = enter_nccl("ncclGroupStart"); told != ncclSuccess) {
    return told;
  }
  if (group_depth++ == 0) {
    group_error = ncclSuccess;
    group_ops.clear();
  }
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  ncclResult_t const told = enter_nccl("ncclGroupEnd");
  if (group_depth == 0) {
    return refuse(nullptr, ncclInvalidUsage, "ncclGroupEnd: not in a group call");
  }
  if (--group_depth > 0) {
    return ncclSuccess;
  }
  std::vector<nccl_op> ops = std::exchange(group_ops, {});
  if (told != ncclSuccess || group_error != ncclSuccess) {
    return told != ncclSuccess ? told : std::exchange(group_error, ncclSuccess);
  }
  return launch_group(std::move(ops));
}

ncclResult_t ncclMemAlloc(void** memory, std::size_t bytes) {
  if (ncclResult_t const told = enter_nccl("ncclMemAlloc"); told != ncclSuccess) {
    return told;
  }
  std::size_t const page = NCCL_WIN_REQUIRED_ALIGNMENT;
  if (cudaMalloc(memory, (bytes + page - 1) / page * page) != cudaSuccess) {
    return refuse(nullptr, ncclUnhandledCudaError, "cudaMalloc failed");
  }
  hidden_lock const lock;
  nccl().allocations.emplace(*memory, bytes);
  return ncclSuccess;
}

ncclResult_t ncclMemFree(void* memory) {
  ncclResult_t const told = enter_nccl("ncclMemFree");
  {
    hidden_lock const lock;
    if (nccl().allocations.erase(memory) == 0) {
      return refuse(nullptr, ncclInvalidArgument, "not of ncclMemAlloc");
    }
  }
  unmap_device_memory(memory);
  return told;
}

ncclResult_t ncclCommRegister(ncclComm_t const comm, void* memory, std::size_t bytes,
                              void** handle) {
  return nccl_query("ncclCommRegister", comm, [&] {
    if (memory == nullptr || bytes == 0) {
      return refuse(comm, ncclInvalidArgument, "no memory");
    }
    nccl().registrations.emplace(*handle = new_handle_locked(), comm);
    return ncclSuccess;
  });
}

ncclResult_t ncclCommDeregister(ncclComm_t const comm, void* handle) {
  return deregister("ncclCommDeregister", nccl().registrations, comm, handle);
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* memory, std::size_t bytes,
                                    ncclWindow_t* window, int flags) {
  return nccl_query("ncclCommWindowRegister", comm, [&] {
    if (memory == nullptr || bytes == 0 ||
        reinterpret_cast<std::uintptr_t>(memory) % NCCL_WIN_REQUIRED_ALIGNMENT != 0) {
      return refuse(comm, ncclInvalidArgument, "memory that isn't aligned for a window");
    }
    if (allocation_of_locked(memory).empty()) {  // it has no handle that peers could map
      return refuse(comm, ncclUnhandledCudaError, "memory that isn't ncclMemAlloc's");
    }
    if (nccl().refuses_windows) {
      *window = nullptr;
      return ncclSuccess;
    }
    std::span<std::byte const> of{static_cast<std::byte const*>(memory), bytes};
    if (nccl().version < NCCL_VERSION(2, 28, 0)) {
      of = allocation_of_locked(memory);
    }
    void* const handle = new_handle_locked();
    nccl().windows.emplace(handle, fake::detail::window{comm, of.data(), of.size(),
                                                        (flags & NCCL_WIN_COLL_SYMMETRIC) != 0});
    *window = static_cast<ncclWindow_t>(handle);
    return ncclSuccess;
  });
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  return deregister("ncclCommWindowDeregister", nccl().windows, comm, window);
}

}  // extern "C"
