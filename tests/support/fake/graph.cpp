// SPDX-License-Identifier: MIT
#include <fake/internal.hpp>

#include <algorithm>
#include <memory>
#include <unordered_set>

// Captures and graphs.

namespace fake::detail {
namespace {

struct work {
  std::function<void()> body;
  access memory;
};

}  // namespace
}  // namespace fake::detail

// The work in the order in which it was captured.
struct CUgraph_st {
  std::vector<fake::detail::work const*> order;
  std::vector<std::shared_ptr<void>> users;
};

struct CUgraphExec_st {
  std::vector<fake::detail::work const*> order;
  std::vector<std::shared_ptr<void>> users;
};

namespace fake::detail {

// Every piece of work and every wait is a node. A stream that joined must be joined back after
// its last node, even if that node is only the wait by which it joined.
struct capture {
  std::uint64_t id = 0;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  CUstream_st* origin = nullptr;
  std::thread::id thread;
  bool invalidated = false;
  std::vector<CUstream_st*> members;
  std::vector<std::vector<std::size_t>> needs;  // of each node
  std::unique_ptr<CUgraph_st> graph;
};

namespace {

struct captures_state {
  std::uint64_t last_id = 0;
  std::map<std::uint64_t, std::unique_ptr<capture>> active;
  std::deque<work> works;  // kept, since a launched graph may be destroyed before it ran
  std::map<CUgraph_st*, std::unique_ptr<CUgraph_st>> graphs;
  std::map<CUgraphExec_st*, std::unique_ptr<CUgraphExec_st>> execs;
};

captures_state& state() {
  static captures_state& it = *new captures_state;
  return it;
}

thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;

void add_node(capture& into, CUstream_st& stream, std::vector<std::size_t> needs) {
  stream.frontier = into.needs.size();
  into.needs.push_back(std::move(needs));
}

capture* find_active_locked(std::uint64_t id) {
  auto const found = state().active.find(id);
  return found == state().active.end() ? nullptr : found->second.get();
}

bool joined(capture const& ended) {
  std::vector<bool> reached(ended.needs.size(), false);
  reached[ended.origin->frontier] = true;
  for (std::size_t node = ended.needs.size(); node-- > 0;) {  // nodes need earlier ones only
    if (!reached[node]) {
      return false;
    }
    for (std::size_t const needed : ended.needs[node]) {
      reached[needed] = true;
    }
  }
  return true;
}

std::unique_ptr<capture> end_locked(capture& ended) {
  for (auto* each : ended.members) {
    each->capturing = nullptr;
  }
  auto const place = state().active.find(ended.id);
  auto result = std::move(place->second);
  state().active.erase(place);
  return result;
}

bool blocking_capture_locked(int device) {
  return std::any_of(state().active.begin(), state().active.end(), [&](auto const& each) {
    auto const& members = each.second->members;
    return std::any_of(members.begin(), members.end(), [&](CUstream_st const* member) {
      return member->device == device && (member->flags & cudaStreamNonBlocking) == 0;
    });
  });
}

cudaStreamCaptureStatus status_locked(CUstream_st const& stream) {
  if (stream.capturing == nullptr) {
    return cudaStreamCaptureStatusNone;
  }
  return stream.capturing->invalidated ? cudaStreamCaptureStatusInvalidated
                                       : cudaStreamCaptureStatusActive;
}

// The status of the null stream can't be told while a stream that waits for it captures.
cudaError_t read_status_locked(CUstream_st const& stream, cudaStreamCaptureStatus* status) {
  if (status == nullptr) {
    return cudaErrorInvalidValue;
  }
  if (is_null_stream_locked(stream) && blocking_capture_locked(stream.device)) {
    return cudaErrorStreamCaptureImplicit;
  }
  *status = status_locked(stream);
  return cudaSuccess;
}

}  // namespace

cudaError_t refuse_unsafe_locked() {
  if (mode_of_thread == cudaStreamCaptureModeRelaxed) {
    return cudaSuccess;
  }
  cudaError_t error = cudaSuccess;
  for (auto const& [id, each] : state().active) {
    bool const own = each->thread == std::this_thread::get_id();
    bool const refuses = own ? each->mode != cudaStreamCaptureModeRelaxed
                             : each->mode == cudaStreamCaptureModeGlobal &&
                                   mode_of_thread == cudaStreamCaptureModeGlobal;
    if (refuses) {
      each->invalidated = true;
      error = cudaErrorStreamCaptureUnsupported;
    }
  }
  return error;
}

cudaError_t refuse_null_stream_locked(CUstream_st const& stream) {
  if (!is_null_stream_locked(stream) || !blocking_capture_locked(stream.device)) {
    return cudaSuccess;
  }
  for (auto const& [id, each] : state().active) {
    for (auto const* member : each->members) {
      if (member->device == stream.device && (member->flags & cudaStreamNonBlocking) == 0) {
        each->invalidated = true;
      }
    }
  }
  return cudaErrorStreamCaptureImplicit;
}

void retain_in_graph_locked(CUstream_st& stream, std::shared_ptr<void> user) {
  stream.capturing->graph->users.push_back(std::move(user));
}

cudaError_t capture_work_locked(CUstream_st& stream, std::function<void()> body, access memory) {
  if (cudaError_t const error = check_capture_locked(stream); error != cudaSuccess) {
    return error;
  }
  auto& into = *stream.capturing;
  into.graph->order.push_back(&state().works.emplace_back(work{std::move(body), memory}));
  add_node(into, stream, {stream.frontier});
  return cudaSuccess;
}

void capture_record_locked(CUstream_st& stream, CUevent_st& event) {
  event.recorded = nullptr;
  event.stream = &stream;
  event.capture = stream.capturing->id;
  event.node = stream.frontier;
}

std::optional<cudaError_t> capture_wait_locked(CUstream_st& stream, CUevent_st& event) {
  if (cudaError_t const error = check_capture_locked(stream); error != cudaSuccess) {
    return error;
  }
  capture* const recorded = find_active_locked(event.capture);
  if (recorded == nullptr) {  // outside of any capture, or in one that has ended
    if (stream.capturing != nullptr) {
      return invalidate_locked(stream, cudaErrorStreamCaptureIsolation);
    }
    return event.capture != 0 ? std::optional{cudaErrorStreamCaptureIsolation} : std::nullopt;
  }
  if (recorded->invalidated) {
    return cudaErrorStreamCaptureInvalidated;
  }
  if (stream.capturing == recorded) {
    add_node(*recorded, stream, {stream.frontier, event.node});
    return cudaSuccess;
  }
  if (stream.capturing != nullptr) {
    recorded->invalidated = true;
    return invalidate_locked(stream, cudaErrorStreamCaptureMerge);
  }
  if (is_null_stream_locked(stream)) {
    recorded->invalidated = true;
    return cudaErrorStreamCaptureImplicit;
  }
  stream.capturing = recorded;
  recorded->members.push_back(&stream);
  add_node(*recorded, stream, {event.node});
  return cudaSuccess;
}

cudaError_t refuse_wait_locked(CUstream_st& stream) {
  if (stream.capturing != nullptr) {
    return invalidate_locked(stream, cudaErrorStreamCaptureUnsupported);
  }
  cudaError_t const error = refuse_null_stream_locked(stream);
  return error != cudaSuccess ? error : refuse_unsafe_locked();
}

cudaError_t refuse_wait_locked(CUevent_st& event) {
  if (event.capture != 0) {
    if (capture* const active = find_active_locked(event.capture)) {
      active->invalidated = true;
    }
    return cudaErrorCapturedEvent;
  }
  return refuse_unsafe_locked();
}

cudaError_t invalidate_locked(CUstream_st& stream, cudaError_t error) {
  stream.capturing->invalidated = true;
  return error;
}

cudaError_t check_capture_locked(CUstream_st const& stream) {
  return stream.capturing != nullptr && stream.capturing->invalidated
             ? cudaErrorStreamCaptureInvalidated
             : cudaSuccess;
}

void leave_capture_locked(CUstream_st& stream) {
  if (stream.capturing == nullptr) {
    return;
  }
  capture& left = *stream.capturing;
  left.invalidated = true;
  if (left.origin == &stream) {
    end_locked(left);
  } else {
    std::erase(left.members, &stream);
    stream.capturing = nullptr;
  }
}

void count_graphs_locked(live_counts& counts) {
  counts.graphs = state().graphs.size();
  counts.graph_execs = state().execs.size();
}

}  // namespace fake::detail

using namespace fake::detail;

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return call_on("cudaStreamBeginCapture", stream, [&](CUstream_st& found) {
    hidden_lock const lock;
    if (mode < cudaStreamCaptureModeGlobal || mode > cudaStreamCaptureModeRelaxed) {
      return cudaErrorInvalidValue;
    }
    if (is_null_stream_locked(found)) {
      return cudaErrorStreamCaptureUnsupported;
    }
    if (found.capturing != nullptr) {
      return cudaErrorIllegalState;
    }
    auto started = std::make_unique<capture>();
    started->id = ++state().last_id;
    started->mode = mode;
    started->origin = &found;
    started->thread = std::this_thread::get_id();
    started->members.push_back(&found);
    started->graph = std::make_unique<CUgraph_st>();
    add_node(*started, found, {});
    found.capturing = started.get();
    state().active.emplace(started->id, std::move(started));
    return cudaSuccess;
  });
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  return call_on("cudaStreamEndCapture", stream, [&](CUstream_st& found) {
    if (graph == nullptr) {
      return cudaErrorInvalidValue;
    }
    hidden_lock const lock;
    *graph = nullptr;
    if (found.capturing == nullptr) {
      return cudaErrorIllegalState;
    }
    capture& ending = *found.capturing;
    if (ending.mode != cudaStreamCaptureModeRelaxed &&
        ending.thread != std::this_thread::get_id()) {
      return cudaErrorStreamCaptureWrongThread;
    }
    if (ending.origin != &found) {
      ending.invalidated = true;
      return cudaErrorStreamCaptureUnmatched;
    }
    auto const ended = end_locked(ending);
    if (ended->invalidated) {
      return cudaErrorStreamCaptureInvalidated;
    }
    if (!joined(*ended)) {
      return cudaErrorStreamCaptureUnjoined;
    }
    *graph = ended->graph.get();
    state().graphs.emplace(*graph, std::move(ended->graph));
    return cudaSuccess;
  });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return call_on("cudaStreamIsCapturing", stream, [&](CUstream_st& found) {
    hidden_lock const lock;
    return read_status_locked(found, status);
  });
}

// Gives no dependencies.
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     cudaGraphNode_t const** dependencies,
                                     cudaGraphEdgeData const** edges, std::size_t* count) {
  return call_on("cudaStreamGetCaptureInfo", stream, [&](CUstream_st& found) {
    hidden_lock const lock;
    if (edges != nullptr && dependencies == nullptr) {
      return cudaErrorInvalidValue;
    }
    if (cudaError_t const error = read_status_locked(found, status); error != cudaSuccess) {
      return error;
    }
    if (*status == cudaStreamCaptureStatusActive) {
      if (id != nullptr) {
        *id = found.capturing->id;
      }
      if (graph != nullptr) {
        *graph = found.capturing->graph.get();
      }
      if (dependencies != nullptr) {
        *dependencies = nullptr;
      }
      if (edges != nullptr) {
        *edges = nullptr;
      }
      if (count != nullptr) {
        *count = 0;
      }
    }
    return cudaSuccess;
  });
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return call("cudaThreadExchangeStreamCaptureMode", [&] {
    if (mode == nullptr || *mode < cudaStreamCaptureModeGlobal ||
        *mode > cudaStreamCaptureModeRelaxed) {
      return cudaErrorInvalidValue;
    }
    std::swap(*mode, mode_of_thread);
    return cudaSuccess;
  });
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  return call("cudaGraphInstantiate", [&] {
    hidden_lock const lock;
    auto const found = state().graphs.find(graph);
    if (exec == nullptr || found == state().graphs.end()) {
      return cudaErrorInvalidValue;
    }
    auto made = std::make_unique<CUgraphExec_st>(
        CUgraphExec_st{found->second->order, found->second->users});
    *exec = made.get();
    state().execs.emplace(*exec, std::move(made));
    return cudaSuccess;
  });
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  return call_on("cudaGraphLaunch", stream, [&](CUstream_st& found) {
    std::vector<work const*> order;
    {
      hidden_lock const lock;
      auto const instance = state().execs.find(exec);
      if (instance == state().execs.end()) {
        return cudaErrorInvalidValue;
      }
      order = instance->second->order;
    }
    for (work const* each : order) {
      cudaError_t const error = add_work(
          found, [each] { each->body(); }, each->memory);
      if (error != cudaSuccess) {
        return error;
      }
    }
    return cudaSuccess;
  });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return release_call("cudaGraphDestroy", [&] {
    hidden_lock const lock;
    return state().graphs.erase(graph) == 0 ? cudaErrorInvalidValue : cudaSuccess;
  });
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  return release_call("cudaGraphExecDestroy", [&] {
    hidden_lock const lock;
    return state().execs.erase(exec) == 0 ? cudaErrorInvalidValue : cudaSuccess;
  });
}

}  // extern "C"
